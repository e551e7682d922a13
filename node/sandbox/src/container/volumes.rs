//! Directories and files of the host in a container: the values of `-v`, and their paths in the guest.
//!
//! They are entries of one virtio-fs device, numbered by position ([`thaw_protocol::share`]). The agent bind-mounts each at its
//! path in the container.

use std::path::{Component, Path, PathBuf};

use thaw_protocol::agent::{layout, oci};
use thaw_protocol::api::Volume;
use thaw_protocol::share::SHARES;

use crate::closest::closest;

/// The name of the entry of the volume at this position.
pub fn name(position: usize) -> String {
    position.to_string()
}

/// The container's mounts of these volumes.
pub(super) fn mounts(volumes: &[Volume]) -> impl Iterator<Item = oci::Mount> {
    volumes.iter().enumerate().map(|(position, volume)| {
        let access = if volume.read_only { "ro" } else { "rw" };
        oci::Mount {
            destination: volume.guest.display().to_string(),
            type_: "bind".into(),
            source: format!("{}/{}", layout::SHARED, name(position)),
            options: ["rbind", access].map(String::from).into(),
            ..Default::default()
        }
    })
}

/// Parses `HOST:GUEST[:OPTIONS]`. A relative host path is relative to the current directory.
///
/// # Errors
/// What is invalid, in words.
pub fn parse(text: &str) -> Result<Volume, String> {
    let mut parts = text.split(':');
    let (Some(host), Some(guest)) = (parts.next(), parts.next()) else {
        return Err("HOST:GUEST, or HOST:GUEST:ro; for a directory of the sandbox's own disk: --mount type=volume,target=GUEST".into());
    };
    let mut read_only = false;
    for option in parts.next().into_iter().flat_map(|options| options.split(',')) {
        match option {
            "ro" => read_only = true,
            // SELinux labels concern processes of the host. The guest has no SELinux.
            "rw" | "z" | "Z" => {}
            other => {
                let closest = closest(other, ["ro", "rw"]);
                return Err(format!("{other:?} is no option of a volume: ro or rw{closest}"));
            }
        }
    }
    if parts.next().is_some() {
        return Err("HOST:GUEST, or HOST:GUEST:ro; paths have no colon".into());
    }
    if !host.contains('/') && host != "." && host != ".." {
        return Err(format!(
            "{host:?} is a name, and volumes have none here: give a path, ./{host} if it is here"
        ));
    }
    let volume = Volume {
        host: std::path::absolute(host).map_err(|e| format!("{host}: {e}"))?,
        guest: PathBuf::from(guest),
        read_only,
    };
    check(&volume).map(|()| volume)
}

/// Checks the paths of a volume.
///
/// # Errors
/// Why they are invalid, in words.
pub fn check(volume: &Volume) -> Result<(), String> {
    let plain =
        |path: &Path| !path.as_os_str().as_encoded_bytes().contains(&0) && path.as_os_str().len() < 4096;
    if !volume.host.is_absolute() || !plain(&volume.host) {
        return Err(format!(
            "{} is not an absolute path of this host",
            volume.host.display()
        ));
    }
    let mut parts = volume.guest.components();
    let leads_down = parts.next() == Some(Component::RootDir)
        && parts.clone().next().is_some()
        && parts.all(|part| matches!(part, Component::Normal(_)));
    match leads_down && plain(&volume.guest) {
        true => Ok(()),
        false => Err(format!(
            "{} is not an absolute path in the container, without '..' and below its root",
            volume.guest.display()
        )),
    }
}

/// Checks that one container can have all of these volumes.
///
/// # Errors
/// Why it cannot, in words.
pub fn check_all(volumes: &[Volume]) -> Result<(), String> {
    if volumes.len() > SHARES {
        return Err(format!("at most {SHARES} volumes"));
    }
    for (position, volume) in volumes.iter().enumerate() {
        check(volume)?;
        if volumes[..position]
            .iter()
            .any(|other| other.guest == volume.guest)
        {
            return Err(format!("two volumes for {}", volume.guest.display()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_are_read_as_docker_reads_them() {
        let data = parse("/srv/data:/data").unwrap();
        assert_eq!(
            (data.host.to_str(), data.guest.to_str(), data.read_only),
            (Some("/srv/data"), Some("/data"), false)
        );
        assert!(parse("/srv/data:/data:ro").unwrap().read_only);
        assert!(!parse("/srv/data:/data:rw,Z").unwrap().read_only);
        let here = std::env::current_dir().unwrap();
        assert_eq!(parse("./x:/data").unwrap().host, here.join("x"));
        for bad in [
            "/a",
            "name:/data",
            "/a:data",
            "/a:/",
            "/a:/b/../c",
            "/a:/b:loud",
            "/a:/b:ro:rw",
            ":/b",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn two_volumes_for_one_place_are_refused() {
        let volume = parse("/a:/data").unwrap();
        check_all(std::slice::from_ref(&volume)).unwrap();
        assert!(check_all(&[volume.clone(), volume.clone()]).is_err());
        assert!(check_all(&vec![volume; SHARES + 1]).is_err());
    }

    #[test]
    fn the_guest_has_them_by_their_position() {
        let volumes = [parse("/a:/data").unwrap(), parse("/b:/conf:ro").unwrap()];
        let mounts: Vec<oci::Mount> = mounts(&volumes).collect();
        assert_eq!(
            (mounts[0].source.as_str(), mounts[0].destination.as_str()),
            ("/run/thaw/shared/0", "/data")
        );
        assert_eq!(mounts[1].source, "/run/thaw/shared/1");
        assert_eq!(mounts[1].options, ["rbind", "ro"]);
    }
}
