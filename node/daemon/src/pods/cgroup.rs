//! The cgroup of a pod, from the OCI runtime specification's `cgroupsPath`: a path, or a systemd slice and scope.

/// The path below the hierarchies' roots, beginning with a slash; `None` if it is empty.
///
/// # Errors
/// What is invalid.
pub(super) fn path(given: &str) -> Result<Option<String>, String> {
    let wrong = || format!("{given:?} is no place for a cgroup");
    let path = match given.split(':').collect::<Vec<_>>()[..] {
        [""] => return Ok(None),
        [plain] => plain.to_owned(),
        [slice, prefix, name] => {
            let unit = match prefix {
                "" => format!("{name}.scope"),
                prefix => format!("{prefix}-{name}.scope"),
            };
            format!("{}/{unit}", expand(slice).ok_or_else(wrong)?)
        }
        _ => return Err(wrong()),
    };
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let good = |part: &&str| !matches!(*part, "." | "..") && !part.contains('\0');
    match !parts.is_empty() && parts.iter().all(good) {
        true => Ok(Some(format!("/{}", parts.join("/")))),
        false => Err(wrong()),
    }
}

/// A slice's path: `a-b.slice` is in `a.slice` (systemd.slice(5)).
fn expand(slice: &str) -> Option<String> {
    let slice = if slice.is_empty() { "system.slice" } else { slice };
    let name = slice.strip_suffix(".slice")?;
    if name == "-" {
        return Some(String::new());
    }
    let mut path = String::new();
    let mut whole = String::new();
    for part in name.split('-') {
        if part.is_empty() || part.contains('/') {
            return None;
        }
        whole = if whole.is_empty() {
            part.to_owned()
        } else {
            format!("{whole}-{part}")
        };
        path = format!("{path}/{whole}.slice");
    }
    Some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_path_or_systemd_slice_is_below_the_roots() {
        let of = |given: &str| path(given).unwrap();
        assert_eq!(of(""), None);
        assert_eq!(of("/default/one").as_deref(), Some("/default/one"));
        assert_eq!(of("kubepods//podx/y/").as_deref(), Some("/kubepods/podx/y"));
        let systemd = of("kubepods-burstable-podx.slice:cri-containerd:y");
        let expected =
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podx.slice/cri-containerd-y.scope";
        assert_eq!(systemd.as_deref(), Some(expected));
        assert_eq!(of(":docker:x").as_deref(), Some("/system.slice/docker-x.scope"));
        assert_eq!(of("-.slice:a:b").as_deref(), Some("/a-b.scope"));
        for bad in [
            "/",
            "/a/../b",
            "a:b",
            "x.service:a:b",
            "a--b.slice:a:b",
            "../x:a:b",
            "..",
            "a/b.slice:c:d",
        ] {
            assert!(path(bad).is_err(), "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn nothing_leads_out_of_the_roots(given in "[a./:-]{0,30}") {
            if let Ok(Some(path)) = path(&given) {
                proptest::prop_assert!(path.starts_with('/') && !path.split('/').any(|p| p == ".." || p == "."));
            }
        }
    }
}
