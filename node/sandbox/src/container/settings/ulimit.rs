//! Resource limits of a container's processes (`setrlimit(2)`), as `--ulimit` names them.

use std::str::FromStr;

use thaw_protocol::agent::oci;

use crate::closest::closest;

const NAMES: [&str; 16] = [
    "as",
    "core",
    "cpu",
    "data",
    "fsize",
    "locks",
    "memlock",
    "msgqueue",
    "nice",
    "nofile",
    "nproc",
    "rss",
    "rtprio",
    "rttime",
    "sigpending",
    "stack",
];

/// A limit: what a process may use, and how far it may raise that itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ulimit {
    name: &'static str,
    soft: u64,
    hard: u64,
}

impl FromStr for Ulimit {
    type Err = String;

    /// Reads `NAME=SOFT[:HARD]`; -1 is no limit.
    fn from_str(text: &str) -> Result<Ulimit, String> {
        let form = || format!("{text:?}: write NAME=SOFT[:HARD], such as nofile=65536:65536; -1 is no limit");
        let (name, values) = text.split_once('=').ok_or_else(form)?;
        let name = NAMES.iter().find(|known| **known == name).ok_or_else(|| {
            format!(
                "{name:?} is no limit: there are {}{}",
                NAMES.join(", "),
                closest(name, NAMES)
            )
        })?;
        let number = |text: &str| match text {
            "-1" | "unlimited" => Ok(u64::MAX),
            text => text.parse().map_err(|_| form()),
        };
        let (soft, hard) = values.split_once(':').unwrap_or((values, values));
        let (soft, hard) = (number(soft)?, number(hard)?);
        match soft <= hard {
            true => Ok(Ulimit { name, soft, hard }),
            false => Err(format!("{text:?}: the soft limit is above the hard one")),
        }
    }
}

/// Sets each, instead of a default of the same name. The last of a name wins.
pub(super) fn set(rlimits: &mut Vec<oci::POSIXRlimit>, ulimits: &[Ulimit]) {
    for ulimit in ulimits {
        let kind = format!("RLIMIT_{}", ulimit.name.to_ascii_uppercase());
        rlimits.retain(|rlimit| rlimit.Type != kind);
        rlimits.push(oci::POSIXRlimit {
            Type: kind,
            Soft: ulimit.soft,
            Hard: ulimit.hard,
            ..Default::default()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_docker_reads_them() {
        let limit = |text: &str| text.parse::<Ulimit>();
        let both = limit("nofile=1024:2048").unwrap();
        assert_eq!((both.name, both.soft, both.hard), ("nofile", 1024, 2048));
        assert_eq!(limit("core=0").unwrap().hard, 0);
        assert_eq!(limit("memlock=-1").unwrap().soft, u64::MAX);
        for wrong in [
            "nofile",
            "files=1",
            "nofile=",
            "nofile=2:1",
            "nofile=-2",
            "nofile=1:2:3",
            "core=-1:0",
        ] {
            assert!(limit(wrong).is_err(), "{wrong}");
        }
        assert!(limit("nofiles=1").unwrap_err().ends_with("closest is nofile"));
    }

    #[test]
    fn limit_replaces_the_default_of_its_name() {
        let mut rlimits = vec![oci::POSIXRlimit {
            Type: "RLIMIT_NOFILE".into(),
            Soft: 1024,
            Hard: 524_288,
            ..Default::default()
        }];
        set(
            &mut rlimits,
            &["nofile=5".parse().unwrap(), "nproc=7".parse().unwrap()],
        );
        let seen: Vec<_> = rlimits.iter().map(|r| (r.Type.as_str(), r.Soft)).collect();
        assert_eq!(seen, [("RLIMIT_NOFILE", 5), ("RLIMIT_NPROC", 7)]);
    }
}
