//! `--mount` of `thaw run`, in docker's form: comma-separated `KEY=VALUE`.

use std::str::FromStr;

use thaw_protocol::api::Volume;
use thaw_sandbox::closest::closest;
use thaw_sandbox::container::parse_volume;
use thaw_sandbox::container::settings::{AnonymousVolume, Tmpfs};

use super::size::ByteSize;

const FIELDS: [&str; 6] = ["type", "source", "target", "readonly", "tmpfs-size", "tmpfs-mode"];

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mount {
    /// A directory or file of this host.
    Bind(Volume),
    /// A file system in memory.
    Tmpfs(Tmpfs),
    /// An empty directory of the sandbox's own disk.
    Volume(AnonymousVolume),
}

const FOR_TMPFS: &str = "tmpfs-size and tmpfs-mode are for type=tmpfs";

/// The fields of a mount as they are given.
#[derive(Default)]
struct Fields<'a> {
    kind: Option<&'a str>,
    source: Option<&'a str>,
    target: Option<&'a str>,
    read_only: bool,
    tmpfs: Vec<String>,
}

impl FromStr for Mount {
    type Err = String;

    fn from_str(text: &str) -> Result<Mount, String> {
        let fields = Fields::read(text)?;
        let target = fields
            .target
            .ok_or("target=PATH is missing: where the container sees it")?;
        match fields.kind {
            Some("bind") | None if fields.source.is_some() || fields.kind.is_some() => fields.bind(target),
            Some("tmpfs") => fields.tmpfs(target),
            Some("volume") | None if fields.source.is_some() => Err(
                "there are no named volumes: share a directory of this host, type=bind,source=PATH, or leave source out".into(),
            ),
            Some("volume") | None => fields.volume(target),
            Some(other) => {
                let closest = closest(other, ["bind", "volume", "tmpfs"]);
                Err(format!("type={other}: there are bind, volume and tmpfs{closest}"))
            }
        }
    }
}

impl<'a> Fields<'a> {
    fn read(text: &'a str) -> Result<Fields<'a>, String> {
        let mut fields = Fields::default();
        for field in text.split(',') {
            let (key, value) = field.split_once('=').unwrap_or((field, ""));
            match key {
                "type" => fields.kind = Some(value),
                "source" | "src" => fields.source = Some(value),
                "target" | "destination" | "dst" => fields.target = Some(value),
                "readonly" | "ro" => fields.read_only = matches!(value, "" | "true" | "1"),
                "tmpfs-size" => {
                    let size: ByteSize = value.parse().map_err(|e| format!("tmpfs-size={value}: {e}"))?;
                    fields.tmpfs.push(format!("size={}", size.bytes()));
                }
                "tmpfs-mode" => fields.tmpfs.push(format!("mode={value}")),
                _ => {
                    return Err(format!(
                        "{key:?} is no field of a mount: there are {}{}",
                        FIELDS.join(", "),
                        closest(key, FIELDS)
                    ));
                }
            }
        }
        Ok(fields)
    }

    fn bind(self, target: &str) -> Result<Mount, String> {
        let source = self
            .source
            .ok_or("source=PATH is missing: what of this host to share")?;
        if !self.tmpfs.is_empty() {
            return Err(FOR_TMPFS.into());
        }
        let access = if self.read_only { "ro" } else { "rw" };
        Ok(Mount::Bind(parse_volume(&format!("{source}:{target}:{access}"))?))
    }

    fn volume(self, target: &str) -> Result<Mount, String> {
        match self.tmpfs.is_empty() {
            true => Ok(Mount::Volume(AnonymousVolume::new(target, self.read_only)?)),
            false => Err(FOR_TMPFS.into()),
        }
    }

    fn tmpfs(self, target: &str) -> Result<Mount, String> {
        if self.source.is_some() {
            return Err("source is for type=bind: a tmpfs has none".into());
        }
        let mut options: Vec<&str> = self.tmpfs.iter().map(String::as_str).collect();
        options.extend(self.read_only.then_some("ro"));
        Ok(Mount::Tmpfs(Tmpfs::new(target, &options)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_read_as_docker_reads_them() {
        let bind = "type=bind,source=/srv/data,target=/data,readonly".parse();
        assert_eq!(bind, Ok(Mount::Bind(parse_volume("/srv/data:/data:ro").unwrap())));
        let short = "src=/srv,dst=/data".parse();
        assert_eq!(short, Ok(Mount::Bind(parse_volume("/srv:/data:rw").unwrap())));
        let tmpfs = "type=tmpfs,target=/run,tmpfs-size=1m,tmpfs-mode=700".parse();
        let same = Tmpfs::new("/run", &["size=1048576", "mode=700"]).unwrap();
        assert_eq!(tmpfs, Ok(Mount::Tmpfs(same)));
        let volume = Ok(Mount::Volume(AnonymousVolume::new("/data", false).unwrap()));
        assert_eq!("type=volume,target=/data".parse(), volume);
        assert_eq!("target=/data/".parse(), volume);
    }

    #[test]
    fn wrong_mounts_are_refused_with_what_is_wrong() {
        for (wrong, named) in [
            ("type=bind,source=/a", "target"),
            ("type=bind,target=/a", "source"),
            ("type=volume,source=data,target=/a", "named volumes"),
            ("type=volume,target=a", "\"a\""),
            ("type=volume,target=/a,tmpfs-mode=700", "tmpfs-mode"),
            ("type=npipe,source=/a,target=/b", "npipe"),
            ("type=tmpfs,source=/a,target=/b", "source"),
            ("type=bind,source=/a,target=/b,tmpfs-size=1m", "tmpfs-size"),
            ("type=tmpfs,target=/b,colour=red", "colour"),
            ("type=tmpfs,targte=/b", "closest is target"),
            ("type=tmpf,target=/b", "closest is tmpfs"),
            ("type=tmpfs,target=/b,tmpfs-size=much", "much"),
        ] {
            let refused = wrong.parse::<Mount>().unwrap_err();
            assert!(refused.contains(named), "{wrong}: {refused}");
        }
    }
}
