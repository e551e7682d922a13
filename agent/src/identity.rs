//! Hostname, machine-id, and the files under `/run/thaw/etc` that are bind-mounted over containers' own.

use std::ffi::CStr;
use std::fs::{self, File};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::error::{Error, Result, WithContext};
use crate::names::Names;
use crate::sandbox::Sandbox;

/// Directory of `hosts`, `hostname` and `resolv.conf`, which containers bind-mount.
pub const ETC: &str = "/run/thaw/etc";

/// Sets the kernel's hostname.
pub fn set_hostname(name: &str) -> Result<()> {
    if name.is_empty()
        || name.len() > 64
        || !name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
    {
        return Err(Error::Invalid(format!(
            "hostname {name:?}: 1 to 64 letters, digits, '-', '.' or '_' are allowed"
        )));
    }
    rustix::system::sethostname(name.as_bytes()).with_context(|| "set the hostname".into())
}

/// Sets the hostname `name` in every container whose own UTS namespace has the hostname `old`, which in a clone
/// of a running sandbox is the original's. A container with another hostname keeps it.
pub fn rename_containers(sandbox: &Sandbox, old: &CStr, name: &str) -> Result<()> {
    let rename = |namespace: &File| {
        let kind = LinkNameSpaceType::HostNameAndNISDomainName;
        move_into_link_name_space(namespace.as_fd(), Some(kind))
            .with_context(|| "enter a container's names".into())?;
        match rustix::system::uname().nodename() == old {
            true => set_hostname(name),
            false => Ok(()),
        }
    };
    for namespace in sandbox.namespaces("uts") {
        // setns(2) changes the calling thread, so this takes a thread that ends afterwards.
        let renamed = std::thread::scope(|scope| scope.spawn(|| rename(&namespace)).join());
        renamed.map_err(|_| Error::State("a container was not renamed".into()))??;
    }
    Ok(())
}

/// Writes `/run/machine-id`, and bind-mounts it at `/etc/machine-id` if the guest image has that file.
pub fn set_machine_id(id: [u8; 16]) -> Result<()> {
    if id == [0; 16] {
        return Err(Error::Invalid("machine-id: all zero".into()));
    }
    let text: String = id
        .iter()
        .map(|b| format!("{b:02x}"))
        .chain(["\n".into()])
        .collect();
    let path = "/run/machine-id";
    // Written in place, so that the bind mounts of containers and of an earlier identity show the new id.
    fs::write(path, &text).with_context(|| format!("write {path}"))?;
    let etc = "/etc/machine-id";
    if fs::read(etc).is_ok_and(|shown| shown != text.as_bytes()) {
        rustix::mount::mount_bind(path, etc).with_context(|| format!("bind {path} over {etc}"))?;
    }
    Ok(())
}

/// Writes the files of [`ETC`]. `addresses` are the guest's own, for `hosts`; `names` are those of its container.
pub fn write_etc(hostname: &str, addresses: &[IpAddr], nameservers: &[IpAddr], names: &Names) -> Result<()> {
    fs::create_dir_all(ETC).with_context(|| format!("create {ETC}"))?;
    let write = |name: &str, text: String| {
        let path = Path::new(ETC).join(name);
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))
    };
    write("hostname", format!("{hostname}\n"))?;
    write("hosts", hosts(hostname, addresses) + &names.hosts())?;
    write("resolv.conf", names.resolv_conf(nameservers))
}

fn hosts(hostname: &str, addresses: &[IpAddr]) -> String {
    let mut text = String::from(
        "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\nfe00::\tip6-localnet\nff00::\tip6-mcastprefix\n\
         ff02::1\tip6-allnodes\nff02::2\tip6-allrouters\n",
    );
    if addresses.is_empty() {
        text.push_str(&format!("127.0.1.1\t{hostname}\n"));
    }
    for ip in addresses {
        text.push_str(&format!("{ip}\t{hostname}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_finds_itself_by_name_with_and_without_a_network() {
        assert!(hosts("h", &[]).ends_with("127.0.1.1\th\n"));
        assert!(hosts("h", &["10.0.0.2".parse().unwrap()]).ends_with("10.0.0.2\th\n"));
    }

    #[test]
    fn hostnames_that_would_break_files_are_refused() {
        for bad in ["", "a b", "a\nb", "a/b", &"x".repeat(65)] {
            assert!(matches!(set_hostname(bad), Err(Error::Invalid(_))), "{bad:?}");
        }
    }
}
