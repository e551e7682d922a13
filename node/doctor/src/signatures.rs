//! The check of which signatures of snapshots this node trusts.

use thaw_sandbox::config::Config;
use thaw_sandbox::error::Error;
use thaw_sandbox::paths::Paths;
use thaw_sandbox::snapshot::{KEYS, Signatures, TrustedKeys};

use super::Check;

const NAME: &str = "snapshot signatures";
const FIX: &str = "put a public key there, *.pub: docs/snapshot-format.md";

pub(super) fn check(paths: &Paths, config: Result<Config, Error>) -> Check {
    let keys = paths.data.join(KEYS);
    let signatures = match config {
        Ok(config) => Signatures::of(&config.snapshots),
        Err(e) => {
            let cost = "neither thaw nor thawd starts";
            return Check::missing(NAME, e.what, cost, "thawd config check");
        }
    };
    let trusted = match TrustedKeys::load(&keys, signatures) {
        Ok(trusted) => trusted,
        Err(e) => {
            return Check::missing(
                NAME,
                e.to_string(),
                "no snapshot is used",
                "remove or repair that key",
            );
        }
    };
    let count = trusted.count();
    match (trusted.required(), count) {
        (true, 0) => Check::missing(
            NAME,
            format!("required, and {} has no key", keys.display()),
            "no snapshot and no template is used",
            FIX,
        ),
        (true, count) => Check::ok(
            NAME,
            format!("required, by one of {count} keys in {}", keys.display()),
        ),
        (false, 0) if signatures == Signatures::AsKeysSay => Check::warn(
            NAME,
            format!("not required: {} has no key", keys.display()),
            "any snapshot that is named is thawed, whoever made it",
            FIX,
        ),
        (false, _) => Check::warn(
            NAME,
            "not required: require_signature = false",
            "an unsigned snapshot that is named is thawed, whoever made it",
            "set require_signature = true in [snapshots] of thawd.toml",
        ),
    }
}

#[cfg(test)]
mod tests {
    use thaw_sandbox::error::ErrorKind;

    use super::*;
    use crate::State;

    /// A public key of RFC 8032.
    const KEY: &str = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=\n-----END PUBLIC KEY-----\n";

    #[test]
    fn snapshot_signatures_tell_whether_they_are_required() {
        let root = tempfile::tempdir().unwrap();
        let paths = Paths {
            data: root.path().to_owned(),
            run: root.path().join("r"),
            kernel: root.path().join("k"),
            guest_image: root.path().join("g"),
        };
        let found = |text: &str| {
            let check = check(&paths, Ok(Config::parse(text).unwrap()));
            (check.state, check.found)
        };
        let (required, not) = (
            "[snapshots]\nrequire_signature = true\n",
            "[snapshots]\nrequire_signature = false\n",
        );
        assert_eq!(found("").0, State::Warn);
        assert_eq!(found(required).0, State::Missing);
        assert!(found(required).1.contains("has no key"));
        std::fs::create_dir(root.path().join(KEYS)).unwrap();
        std::fs::write(root.path().join(KEYS).join("k.pub"), KEY).unwrap();
        assert_eq!(found("").0, State::Ok);
        assert_eq!(found(required).0, State::Ok);
        assert_eq!(found(not).0, State::Warn);
        std::fs::write(root.path().join(KEYS).join("bad.pub"), "no key").unwrap();
        assert_eq!(found("").0, State::Missing);
        let broken = Error::new(ErrorKind::ConfigInvalid, "line 1");
        assert_eq!(check(&paths, Err(broken)).state, State::Missing);
    }
}
