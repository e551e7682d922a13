//! Files that containers get from their pod: `/etc/hostname`, `/etc/hosts`, `/etc/resolv.conf` and the shared
//! memory. With the sandbox API, CRI leaves them to the shim.

use std::fmt::Write as _;
use std::io::{self, Read};
use std::path::Path;

use thaw_protocol::shim::pod_sandbox::PodSandboxConfig;

use crate::error::{Result, WithContext};
use crate::spec::config::{Mount, Spec};

/// File names in the pod's bundle, and their paths in a container.
const FILES: [(&str, &str); 3] = [
    ("hostname", "/etc/hostname"),
    ("hosts", "/etc/hosts"),
    ("resolv.conf", "/etc/resolv.conf"),
];
const SHARED_MEMORY: &str = "/dev/shm";
/// Most bytes copied of a host file.
const MAX_SIZE: u64 = 1 << 20;
/// `/etc/hosts` if the host has none.
const LOCALHOST: &str = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n";

/// Writes the files into the pod's bundle.
pub fn write(bundle: &Path, config: &PodSandboxConfig) -> Result<()> {
    let of_the_host = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    let hostname = match config.hostname.as_str() {
        "" => of_the_host(),
        given => given.to_owned(),
    };
    let hosts = read("/etc/hosts").unwrap_or_else(|_| LOCALHOST.into());
    let names = match config.dns_config.as_ref() {
        Some(dns) if !(dns.servers.is_empty() && dns.searches.is_empty() && dns.options.is_empty()) => {
            resolv_conf(&dns.servers, &dns.searches, &dns.options)
        }
        _ => read("/etc/resolv.conf").unwrap_or_default(),
    };
    for ((name, _), text) in FILES.iter().zip([format!("{hostname}\n"), hosts, names]) {
        let path = bundle.join(name);
        std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

fn read(path: &str) -> io::Result<String> {
    let mut text = String::new();
    std::fs::File::open(path)?
        .take(MAX_SIZE)
        .read_to_string(&mut text)?;
    Ok(text)
}

fn resolv_conf(servers: &[String], searches: &[String], options: &[String]) -> String {
    let mut text = String::new();
    if !searches.is_empty() {
        let _ = writeln!(text, "search {}", searches.join(" "));
    }
    for server in servers {
        let _ = writeln!(text, "nameserver {server}");
    }
    if !options.is_empty() {
        let _ = writeln!(text, "options {}", options.join(" "));
    }
    text
}

/// Adds the files to a container's specification where it lacks them.
pub fn complete(spec: &mut Spec, bundle: &Path) {
    let access = match spec.root.as_ref().is_some_and(|root| root.readonly) {
        true => "ro",
        false => "rw",
    };
    for (name, destination) in FILES {
        let source = bundle.join(name).display().to_string();
        match spec
            .mounts
            .iter_mut()
            .find(|mount| mount.destination == destination)
        {
            // CRI names files that it has not written.
            Some(mount) if !Path::new(&mount.source).exists() => mount.source = source,
            Some(_) => {}
            None => spec
                .mounts
                .push(bind(destination, source, &["rbind", "rprivate", access])),
        }
    }
    let is_the_pods = |of: &str| spec.linux.namespace(of).is_none_or(|ipc| !ipc.path.is_empty());
    if is_the_pods("ipc") {
        let options = ["rbind", "rprivate", "nosuid", "nodev", "noexec"];
        let shared = bind(SHARED_MEMORY, SHARED_MEMORY.into(), &options);
        match spec
            .mounts
            .iter_mut()
            .find(|mount| mount.destination == SHARED_MEMORY)
        {
            // A tmpfs of the container's own would not be shared with the pod.
            Some(mount) if mount.kind == "tmpfs" => *mount = shared,
            Some(_) => {}
            None => spec.mounts.push(shared),
        }
    }
}

fn bind(destination: &str, source: String, options: &[&str]) -> Mount {
    Mount {
        destination: destination.into(),
        kind: "bind".into(),
        source,
        options: options.iter().map(|&option| option.to_owned()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::config::Namespace;
    use thaw_protocol::shim::MessageField;
    use thaw_protocol::shim::pod_sandbox::DNSConfig;

    #[test]
    fn container_gets_its_pods_hostname_and_dns_files() {
        let bundle = tempfile::tempdir().unwrap();
        let dns = DNSConfig {
            servers: vec!["10.0.0.10".into(), "fd00::10".into()],
            searches: vec!["a.svc".into(), "svc".into()],
            options: vec!["ndots:5".into()],
            ..Default::default()
        };
        let config = PodSandboxConfig {
            hostname: "web-0".into(),
            dns_config: MessageField::some(dns),
            ..Default::default()
        };
        write(bundle.path(), &config).unwrap();
        let text = |name: &str| std::fs::read_to_string(bundle.path().join(name)).unwrap();
        assert_eq!(text("hostname"), "web-0\n");
        assert_eq!(
            text("resolv.conf"),
            "search a.svc svc\nnameserver 10.0.0.10\nnameserver fd00::10\noptions ndots:5\n"
        );

        let given = bundle.path().join("kubelets-hosts");
        std::fs::write(&given, "").unwrap();
        let given = given.display().to_string();
        let mut spec = Spec {
            mounts: vec![
                bind("/etc/hosts", given.clone(), &["rbind"]),
                bind(
                    "/etc/resolv.conf",
                    "/nowhere/resolv.conf".into(),
                    &["rbind", "ro"],
                ),
                Mount {
                    destination: "/dev/shm".into(),
                    kind: "tmpfs".into(),
                    source: "shm".into(),
                    options: vec!["size=64k".into()],
                },
            ],
            ..Default::default()
        };
        let mut own = spec.clone();
        complete(&mut spec, bundle.path());
        let source = |spec: &Spec, at: &str| {
            let mount = spec.mounts.iter().find(|mount| mount.destination == at);
            mount.map(|mount| mount.source.clone())
        };
        let ours = |name: &str| Some(bundle.path().join(name).display().to_string());
        assert_eq!(source(&spec, "/etc/hosts"), Some(given));
        assert_eq!(source(&spec, "/etc/resolv.conf"), ours("resolv.conf"));
        assert_eq!(source(&spec, "/etc/hostname"), ours("hostname"));
        assert_eq!(source(&spec, "/dev/shm"), Some("/dev/shm".into()));
        // A container with its own IPC namespace has shared memory of its own.
        own.linux.namespaces.push(Namespace {
            kind: "ipc".into(),
            ..Default::default()
        });
        complete(&mut own, bundle.path());
        assert_eq!(source(&own, "/dev/shm"), Some("shm".into()));
    }
}
