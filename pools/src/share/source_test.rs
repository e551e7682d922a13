use super::*;
use proptest::prelude::*;

fn parse(kind: &str, source: &str, options: &[&str]) -> Result<Source, SourceError> {
    let options: Vec<String> = options.iter().map(|o| (*o).to_owned()).collect();
    Source::parse(kind, source, &options)
}

#[test]
fn overlay_options_are_directories_and_known_words() {
    let options = [
        "index=off",
        "userxattr",
        "workdir=/s/3/work",
        "upperdir=/s/3/fs",
        "lowerdir=/s/2/fs:/s/1\\:x/fs",
    ];
    let Tree::Overlay {
        lower,
        upper,
        options,
    } = parse("overlay", "overlay", &options).unwrap().tree
    else {
        panic!("no overlay")
    };
    assert_eq!(lower, [PathBuf::from("/s/2/fs"), PathBuf::from("/s/1:x/fs")]);
    assert_eq!(upper, Some(("/s/3/fs".into(), "/s/3/work".into())));
    assert_eq!(
        options,
        [("index".into(), Some("off".into())), ("userxattr".into(), None)]
    );
    for bad in [
        &["lowerdir=/a"][..],
        &["lowerdir=/a:b", "upperdir=/u", "workdir=/w"],
        &["lowerdir=/a:/b", "upperdir=/u"],
        &["upperdir=/u", "workdir=/w"],
        &["lowerdir=/a:/b", "context=system_u"],
        &["lowerdir=/a:/b", "index=/etc/passwd"],
        &["lowerdir=/a:/b", "lowerdir"],
    ] {
        assert!(parse("overlay", "overlay", bad).is_err(), "{bad:?}");
    }
}

#[test]
fn bind_options_set_recursion_and_last_access_wins() {
    let bound = |options: &[&str]| {
        let parsed = parse("bind", "/srv", options).unwrap();
        let Tree::Bind { recursive, .. } = parsed.tree else {
            panic!("no bind")
        };
        (recursive, parsed.read_only, parsed.follows_host)
    };
    assert_eq!(bound(&["rbind", "rprivate", "ro"]), (true, true, false));
    assert_eq!(bound(&["bind", "ro", "rw", "rslave"]), (false, false, true));
    assert_eq!(
        bound(&["nosuid,nodev", "x-systemd.automount"]),
        (true, false, false)
    );
    let below = |options: &[&str]| parse("bind", "/srv", options).unwrap().read_only_below;
    assert_eq!(
        [below(&["ro"]), below(&["ro", "rro"]), below(&["rro", "rw"])],
        [false, true, false]
    );
    assert!(matches!(
        parse("bind", "/srv", &["rshared"]),
        Err(SourceError::Shared(_))
    ));
    assert!(matches!(parse("bind", "srv", &[]), Err(SourceError::Path(_))));
    assert!(parse("bind", "/srv", &["idmap=x"]).is_err());
    // Docker and others leave the type out.
    assert!(parse("none", "/srv", &["rbind"]).is_ok());
}

#[test]
fn device_file_system_must_be_a_known_one() {
    let parsed = parse("ext4", "/dev/mapper/x", &["ro", "loop", "discard"]).unwrap();
    let Tree::Device { kind, path, options } = parsed.tree else {
        panic!("no device")
    };
    assert_eq!(
        (kind.as_str(), path.to_str(), parsed.read_only),
        ("ext4", Some("/dev/mapper/x"), true)
    );
    assert_eq!(options, [("discard".into(), None)]);
    assert_eq!(parse("nfs", "/x", &[]), Err(SourceError::Type("nfs".into())));
    assert!(parse("ext4", "/dev/x", &["journal_dev=8"]).is_err());
}

proptest! {
    /// For any input, the result contains no other option and no relative path.
    #[test]
    fn source_has_absolute_paths_and_plain_words(
        kind in "bind|overlay|ext4|erofs|none|[a-z]{0,4}",
        source in "/?[a-z/.:,=]{0,12}",
        options in proptest::collection::vec("(lowerdir=|upperdir=|workdir=|index=|subvol=)?[a-z/:,=\\\\+]{0,16}", 0..6),
    ) {
        let Ok(parsed) = Source::parse(&kind, &source, &options) else { return Ok(()) };
        let (paths, options) = match parsed.tree {
            Tree::Bind { path, .. } => (vec![path], vec![]),
            Tree::Overlay { mut lower, upper, options } => {
                let (upper, work) = upper.unzip();
                lower.extend(upper.into_iter().chain(work));
                (lower, options)
            }
            Tree::Device { path, options, .. } => (vec![path], options),
        };
        prop_assert!(paths.iter().all(|path| path.is_absolute()));
        for (name, value) in options {
            prop_assert!(!name.contains([',', '/', '=']), "{}", name);
            prop_assert!(value.is_none_or(|v| !v.contains([',', '/', ':'])));
        }
    }
}
