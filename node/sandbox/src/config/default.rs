//! The commented default configuration, and the check of a configuration file.

use std::path::Path;

use super::{Config, default_path};
use crate::error::Error;

/// Every option with its default and a description. Options without a default are commented out.
pub const DEFAULT: &str = include_str!("default.toml");

/// Checks a configuration file: `file`, or else the one that this process would read. Returns a message that names the valid file.
///
/// # Errors
/// `config-invalid`: with the file, the line, the key and the reason.
pub fn check(file: Option<&Path>) -> Result<String, Error> {
    let named = file.map(Path::to_owned).or_else(super::named);
    if let Some(file) = named {
        Config::at(&file)?;
        return Ok(format!("{} is good", file.display()));
    }
    let file = default_path();
    Ok(match Config::read(&file)? {
        Some(_) => format!("{} is good", file.display()),
        None => format!("{} is not there: everything has its default", file.display()),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::num::NonZeroU32;

    use thaw_images::registry::{Config as FetchConfig, Mirror, MirrorKind};
    use thaw_network::Setup;

    use super::super::api::{ApiConfig, MetricsConfig};
    use super::super::e2b::{ClusterConfig, E2bConfig, E2bTemplate, EndpointSlicesConfig};
    use super::super::pools::{ParkedConfig, PoolsConfig, ShellsConfig};
    use super::super::quotas::{CapacityConfig, QuotaConfig, QuotasConfig};
    use super::super::{
        DiskConfig, DiskLimit, PrefetchConfig, SandboxConfig, Size, SnapshotsConfig, StoreConfig,
        TracingConfig,
    };
    use super::*;
    use crate::error::ErrorKind;

    /// The default configuration with the commented options enabled.
    fn uncommented() -> String {
        let lines = DEFAULT.lines().map(|line| match line.strip_prefix('#') {
            Some(rest) if rest.starts_with(|c: char| c.is_ascii_lowercase() || c == '[') => rest,
            _ => line,
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    /// A configuration with every option set. A new field fails to compile here, and must then be added below.
    fn whole() -> Config {
        let PrefetchConfig { enabled, limit } = PrefetchConfig::default();
        let SandboxConfig {
            require_limits: _,
            require_jail: _,
            failed_retention_s,
            failed_most,
        } = SandboxConfig::default();
        Config {
            store: StoreConfig {
                limit: Some(Size(40 << 30)),
            },
            prefetch: PrefetchConfig { enabled, limit },
            fetch: whole_fetch(),
            network: whole_network(),
            pools: whole_pools(),
            api: ApiConfig {
                listen: Some(([0, 0, 0, 0], 8443).into()),
                certificate: Some("/etc/thaw/server.pem".into()),
                key: Some("/etc/thaw/server.key".into()),
                client_ca: Some("/etc/thaw/clients.pem".into()),
                client_roles: Some("/etc/thaw/client-roles".into()),
                tokens: Some("/etc/thaw/tokens".into()),
                separate_tenants: false,
            },
            metrics: MetricsConfig {
                listen: Some(([127, 0, 0, 1], 9464).into()),
            },
            e2b: whole_e2b(),
            tracing: TracingConfig {
                otlp: Some("http://127.0.0.1:4318".into()),
            },
            sandbox: SandboxConfig {
                require_limits: Some(true),
                require_jail: Some(true),
                failed_retention_s,
                failed_most,
            },
            snapshots: SnapshotsConfig {
                require_signature: Some(true),
                held: Size(1 << 30),
                keep_days: Some(NonZeroU32::new(30).unwrap()),
                keep_count: Some(NonZeroU32::new(100).unwrap()),
                keep_bytes: Some(Size(100 << 30)),
            },
            disk: DiskConfig {
                limit: Some(DiskLimit::Percent(80)),
            },
            quotas: whole_quotas(),
            capacity: CapacityConfig {
                memory_overcommit: Some(1.5),
                vcpu_overcommit: Some(8.0),
            },
        }
    }

    fn whole_quotas() -> QuotasConfig {
        let default = QuotaConfig {
            running: Some(20),
            paused: Some(50),
            vcpus: Some(40),
            memory: Some(Size(64 << 30)),
            disk: Some(Size(500 << 30)),
            snapshots: Some(Size(200 << 30)),
            creations_per_minute: Some(120),
        };
        let acme = QuotaConfig {
            running: Some(100),
            ..QuotaConfig::default()
        };
        QuotasConfig {
            default,
            tenants: [("acme".parse().unwrap(), acme)].into(),
        }
    }

    fn whole_fetch() -> FetchConfig {
        let mirror = Mirror {
            url: "https://mirror.example".into(),
            kind: MirrorKind::Registry,
            headers: [("x-team".into(), "images".into())].into(),
            credentials_in_clear: false,
        };
        FetchConfig {
            mirrors: [("docker.io".into(), vec![mirror])].into(),
            prefetch_bandwidth: Some(50_000_000),
            ..FetchConfig::default()
        }
    }

    fn whole_network() -> Setup {
        let Setup {
            range,
            forwarding,
            fast_path,
            nameservers: _,
        } = Setup::default();
        Setup {
            range,
            forwarding,
            fast_path,
            nameservers: vec![[192, 0, 2, 53].into()],
        }
    }

    fn whole_e2b() -> E2bConfig {
        let base = E2bTemplate {
            image: Some("docker.io/library/python:3.13-slim".into()),
            cpus: Some(2),
            memory_mib: Some(512),
            disk_mib: Some(8192),
            command: Some(["sleep", "infinity"].map(str::to_owned).into()),
            snapshot: None,
        };
        let warm = E2bTemplate {
            snapshot: Some("warm".into()),
            ..E2bTemplate::default()
        };
        E2bConfig {
            listen: Some(([127, 0, 0, 1], 3000).into()),
            domain: Some("sandboxes.example".into()),
            templates: [("base".into(), base), ("warm".into(), warm)].into(),
            cluster: Some(whole_cluster()),
        }
    }

    fn whole_cluster() -> ClusterConfig {
        let url = |name: &str| (name.to_owned(), format!("https://{name}.example:3000"));
        ClusterConfig {
            node: Some("a".into()),
            key: "/etc/thaw/cluster-key".into(),
            ca: Some("/etc/thaw/ca.pem".into()),
            paused_registry: Some("registry.example/thaw/paused".into()),
            nodes: ["a", "b"].map(url).into(),
            endpoint_slices: Some(EndpointSlicesConfig {
                service: "thaw-e2b".into(),
                namespace: Some("thaw-system".into()),
                port: "e2b".into(),
                server_name: "sandboxes.example".into(),
            }),
        }
    }

    fn whole_pools() -> PoolsConfig {
        let PoolsConfig {
            makers,
            larger_templates,
            disks,
            networks,
            cgroups,
            shells: ShellsConfig { shapes, each },
            parked:
                ParkedConfig {
                    templates,
                    snapshots,
                    each: each_parked,
                    within_s,
                },
        } = PoolsConfig::default();
        PoolsConfig {
            shells: ShellsConfig { shapes, each },
            cgroups,
            networks,
            disks,
            larger_templates,
            makers,
            parked: ParkedConfig {
                templates,
                snapshots,
                each: each_parked,
                within_s,
            },
        }
    }

    /// The paths of all keys in a table.
    fn keys(value: &toml::Value, path: &str, into: &mut BTreeSet<String>) {
        match value {
            toml::Value::Table(table) => {
                for (key, value) in table {
                    into.insert(format!("{path}.{key}"));
                    keys(value, &format!("{path}.{key}"), into);
                }
            }
            toml::Value::Array(all) => all.iter().for_each(|value| keys(value, path, into)),
            _ => {}
        }
    }

    fn keys_of(text: &str) -> BTreeSet<String> {
        let mut all = BTreeSet::new();
        keys(&toml::Value::Table(text.parse().unwrap()), "", &mut all);
        all
    }

    #[test]
    fn the_text_is_the_defaults_and_has_every_key() {
        assert_eq!(Config::parse(DEFAULT).unwrap(), Config::default());
        assert_eq!(Config::parse(&uncommented()).unwrap(), whole());
        let written = toml::to_string(&whole()).unwrap();
        assert_eq!(keys_of(&uncommented()), keys_of(&written));
    }

    #[test]
    fn a_file_is_good_or_its_line_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("thawd.toml");
        let missing = check(Some(&path)).unwrap_err();
        assert_eq!(missing.kind, ErrorKind::ConfigInvalid);
        assert!(missing.what.contains("not there"), "{missing}");
        std::fs::write(&path, DEFAULT).unwrap();
        assert_eq!(check(Some(&path)).unwrap(), format!("{} is good", path.display()));
        std::fs::write(&path, DEFAULT.replace("makers", "bakers")).unwrap();
        let wrong = check(Some(&path)).unwrap_err();
        let line = DEFAULT.lines().position(|l| l.starts_with("makers")).unwrap() + 1;
        assert_eq!(wrong.kind, ErrorKind::ConfigInvalid);
        assert!(
            wrong.what.contains(&format!("line {line}")) && wrong.what.contains("bakers"),
            "{wrong}"
        );
        std::fs::write(&path, "[[fetch.mirrors.\"docker.io\"]]\nurl = \"ftp://mirror\"\n").unwrap();
        let wrong = check(Some(&path)).unwrap_err();
        assert_eq!(wrong.kind, ErrorKind::ConfigInvalid);
        assert!(wrong.what.contains("line 2"), "{wrong}");
    }
}
