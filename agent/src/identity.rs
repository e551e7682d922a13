//! Hostname, machine-id and the files under `/run/thaw/etc` that containers get bound over their own.

use std::fs;
use std::net::IpAddr;
use std::path::Path;

use crate::error::{Error, For, Result};

/// Where `hosts`, `hostname` and `resolv.conf` are, for a container's bind mounts.
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
    rustix::system::sethostname(name.as_bytes()).for_(|| "set the hostname".into())
}

/// Writes `/run/machine-id`, and shows it at `/etc/machine-id` where the guest image has one.
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
    // In place: a container's bind mounts, and ours of an earlier identity, show the new one.
    fs::write(path, &text).for_(|| format!("write {path}"))?;
    let etc = "/etc/machine-id";
    if fs::read(etc).is_ok_and(|shown| shown != text.as_bytes()) {
        rustix::mount::mount_bind(path, etc).for_(|| format!("bind {path} over {etc}"))?;
    }
    Ok(())
}

/// Writes the files of [`ETC`]. `addresses` are the guest's own, for `hosts`.
pub fn write_etc(hostname: &str, addresses: &[IpAddr], nameservers: &[IpAddr]) -> Result<()> {
    fs::create_dir_all(ETC).for_(|| format!("create {ETC}"))?;
    let write = |name: &str, text: String| {
        let path = Path::new(ETC).join(name);
        fs::write(&path, text).for_(|| format!("write {}", path.display()))
    };
    write("hostname", format!("{hostname}\n"))?;
    write("hosts", hosts(hostname, addresses))?;
    write(
        "resolv.conf",
        nameservers
            .iter()
            .map(|ip| format!("nameserver {ip}\n"))
            .collect(),
    )
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
