//! A request's container as [`Options`]: its settings are read as `thaw run` reads its flags.

use std::str::FromStr;

use thaw_protocol::api::{ContainerSettings, SeccompProfile, StartContainer};

use super::names::{Names, parse_server};
use super::seccomp_profile::Profile;
use super::settings::{Chosen, Settings, Sysctl};
use super::{HookOptions, Options, Seccomp};

/// Most values of one setting.
const MAX_VALUES: usize = 128;

/// The options of the container that a request asks for. Its host name, its volumes and the size of its terminal are not among its fields.
///
/// # Errors
/// The setting that is invalid, and why.
pub fn requested(asked: &StartContainer) -> Result<Options, String> {
    let given = &asked.settings;
    let options = Options {
        entrypoint: asked.entrypoint.clone(),
        command: asked.command.clone(),
        env: asked.env.clone(),
        workdir: asked.workdir.clone(),
        user: asked.user.clone(),
        tty: asked.tty,
        read_only: asked.read_only,
        seccomp: seccomp(asked.seccomp, given.seccomp_profile.as_deref())?,
        settings: settings(given)?,
        names: names(given)?,
        init: given.init,
        hooks: HookOptions {
            own: asked.hooks.clone(),
            ignore_image: asked.no_image_hooks,
        },
        readiness: asked.readiness.clone(),
        ..Options::default()
    };
    Ok(options)
}

fn settings(given: &ContainerSettings) -> Result<Settings, String> {
    if given.shm_bytes == Some(0) {
        return Err("settings.shm_bytes is at least 1".into());
    }
    let sysctls = &given.sysctls;
    if sysctls.len() > MAX_VALUES {
        return Err(format!("settings.sysctls has at most {MAX_VALUES} entries"));
    }
    let sysctls = sysctls.iter().map(|(name, value)| {
        let read = Sysctl::new(name, value);
        read.map_err(|why| format!("settings.sysctls: {why}"))
    });
    Ok(Settings {
        tmpfs: read("tmpfs", &given.tmpfs, FromStr::from_str)?,
        anonymous_volumes: read("anonymous_volumes", &given.anonymous_volumes, FromStr::from_str)?,
        shm_bytes: given.shm_bytes,
        ulimits: read("ulimits", &given.ulimits, FromStr::from_str)?,
        sysctls: sysctls.collect::<Result<_, _>>()?,
        capabilities: Chosen {
            add: read("cap_add", &given.cap_add, FromStr::from_str)?,
            drop: read("cap_drop", &given.cap_drop, FromStr::from_str)?,
        },
        devices: read("devices", &given.devices, FromStr::from_str)?,
        privileged: given.privileged,
        no_new_privileges: given.no_new_privileges,
        groups: read("group_add", &given.group_add, FromStr::from_str)?,
        domainname: read_one("domainname", given.domainname.as_deref())?,
    })
}

fn names(given: &ContainerSettings) -> Result<Names, String> {
    Ok(Names {
        hosts: read("extra_hosts", &given.extra_hosts, FromStr::from_str)?,
        servers: read("dns", &given.dns, parse_server)?,
        search: read("dns_search", &given.dns_search, FromStr::from_str)?,
        options: read("dns_options", &given.dns_options, FromStr::from_str)?,
    })
}

fn seccomp(named: SeccompProfile, profile: Option<&str>) -> Result<Seccomp, String> {
    match (named, profile) {
        (named, None) => Ok(named.into()),
        (SeccompProfile::Unconfined, Some(_)) => {
            Err("seccomp is unconfined, and settings.seccomp_profile is a profile: leave one out".into())
        }
        (SeccompProfile::Default, Some(json)) => {
            let profile = Profile::parse(json.as_bytes());
            let profile = profile.map_err(|why| format!("settings.seccomp_profile: {why}"))?;
            Ok(Seccomp::Profile(profile))
        }
    }
}

/// Reads a setting that has one value at most.
fn read_one<T: FromStr<Err = String>>(field: &str, value: Option<&str>) -> Result<Option<T>, String> {
    let parsed = value.map(|value| value.parse().map_err(|why| format!("settings.{field}: {why}")));
    parsed.transpose()
}

/// Reads the values of a setting.
fn read<T>(
    field: &str,
    values: &[String],
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Vec<T>, String> {
    if values.len() > MAX_VALUES {
        return Err(format!("settings.{field} has at most {MAX_VALUES} values"));
    }
    let parsed = values
        .iter()
        .map(|value| parse(value).map_err(|why| format!("settings.{field}: {why}")));
    parsed.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(settings: ContainerSettings) -> Result<Options, String> {
        requested(&StartContainer {
            settings,
            ..StartContainer::default()
        })
    }

    #[test]
    fn settings_are_read_as_the_flags_are() {
        let texts = |text: &str| vec![text.to_owned()];
        let options = with(ContainerSettings {
            tmpfs: texts("/run:size=1m"),
            anonymous_volumes: texts("/data:ro"),
            shm_bytes: Some(4096),
            ulimits: texts("nofile=9"),
            sysctls: [("net.core.somaxconn".into(), "7".into())].into(),
            cap_add: texts("net_admin"),
            cap_drop: texts("ALL"),
            devices: texts("/dev/fuse"),
            privileged: true,
            no_new_privileges: true,
            seccomp_profile: Some(r#"{"defaultAction":"SCMP_ACT_ALLOW"}"#.into()),
            init: true,
            extra_hosts: texts("db:192.0.2.7"),
            dns: texts("192.0.2.53"),
            dns_search: texts("a.example"),
            dns_options: texts("ndots:2"),
            group_add: texts("audio"),
            domainname: Some("corp.example".into()),
        });
        let options = options.unwrap();
        let expected = Settings {
            tmpfs: vec!["/run:size=1m".parse().unwrap()],
            anonymous_volumes: vec!["/data:ro".parse().unwrap()],
            shm_bytes: Some(4096),
            ulimits: vec!["nofile=9".parse().unwrap()],
            sysctls: vec!["net.core.somaxconn=7".parse().unwrap()],
            capabilities: Chosen {
                add: vec!["NET_ADMIN".parse().unwrap()],
                drop: vec!["ALL".parse().unwrap()],
            },
            devices: vec!["/dev/fuse".parse().unwrap()],
            privileged: true,
            no_new_privileges: true,
            groups: vec!["audio".parse().unwrap()],
            domainname: Some("corp.example".parse().unwrap()),
        };
        assert_eq!(options.settings, expected);
        assert_eq!(options.names.hosts, ["db:192.0.2.7".parse().unwrap()]);
        assert_eq!((options.names.servers.len(), options.names.search.len()), (1, 1));
        assert_eq!(options.names.options, ["ndots:2".parse().unwrap()]);
        assert!(options.init && matches!(options.seccomp, Seccomp::Profile(_)));
        assert_eq!(with(ContainerSettings::default()).unwrap(), Options::default());
    }

    #[test]
    fn bad_settings_are_named_with_their_value() {
        let read = |json: &str| with(serde_json::from_str(json).unwrap()).unwrap_err();
        for (json, field, value) in [
            (r#"{"tmpfs":["run"]}"#, "settings.tmpfs", "\"run\""),
            (
                r#"{"anonymous_volumes":["data"]}"#,
                "settings.anonymous_volumes",
                "\"data\"",
            ),
            (r#"{"ulimits":["files=1"]}"#, "settings.ulimits", "\"files\""),
            (r#"{"sysctls":{"a b":"1"}}"#, "settings.sysctls", "\"a b\""),
            (r#"{"cap_add":["NET_MASTER"]}"#, "settings.cap_add", "NET_MASTER"),
            (r#"{"cap_drop":["x"]}"#, "settings.cap_drop", "\"x\""),
            (r#"{"devices":["/dev/sda"]}"#, "settings.devices", "/dev/sda"),
            (r#"{"extra_hosts":["db"]}"#, "settings.extra_hosts", "\"db\""),
            (r#"{"dns":["one"]}"#, "settings.dns", "\"one\""),
            (r#"{"dns_search":["a b"]}"#, "settings.dns_search", "\"a b\""),
            (r#"{"dns_options":["a b"]}"#, "settings.dns_options", "\"a b\""),
            (r#"{"group_add":["a:b"]}"#, "settings.group_add", "\"a:b\""),
            (r#"{"domainname":"a b"}"#, "settings.domainname", "\"a b\""),
            (r#"{"shm_bytes":0}"#, "settings.shm_bytes", "1"),
            (
                r#"{"seccomp_profile":"{}"}"#,
                "settings.seccomp_profile",
                "defaultAction",
            ),
        ] {
            let refused = read(json);
            assert!(refused.contains(field) && refused.contains(value), "{refused}");
        }
        let many = with(ContainerSettings {
            dns: vec!["192.0.2.53".into(); MAX_VALUES + 1],
            ..ContainerSettings::default()
        });
        assert!(many.unwrap_err().contains("settings.dns has at most 128"));
        let both = requested(&StartContainer {
            seccomp: SeccompProfile::Unconfined,
            settings: ContainerSettings {
                seccomp_profile: Some("{}".into()),
                ..ContainerSettings::default()
            },
            ..StartContainer::default()
        });
        assert!(both.unwrap_err().contains("leave one out"));
    }
}
