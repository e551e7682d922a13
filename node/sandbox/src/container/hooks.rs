//! The hooks of a container: its caller's, and otherwise those that labels of its image name.

use oci_spec::image::ImageConfiguration;
use thaw_protocol::api::{Hook, Hooks};

use crate::error::{Error, ErrorKind};

/// Labels of an image whose values are hooks, as JSON.
const BEFORE_FREEZE: &str = "run.thaw.before-freeze";
const AFTER_THAW: &str = "run.thaw.after-thaw";

/// The hooks that a caller chose for a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HookOptions {
    /// Each that is `None` is the image's.
    pub own: Hooks,
    /// The container has none of the image's.
    pub ignore_image: bool,
}

/// The hooks of a container of this image.
///
/// # Errors
/// [`ErrorKind::ImageMalformed`]: a label of the image that applies is no valid hook.
pub(super) fn of(image: &ImageConfiguration, options: &HookOptions) -> Result<Hooks, Error> {
    let own = &options.own;
    if options.ignore_image {
        return Ok(own.clone());
    }
    let or_labelled = |own: &Option<Hook>, label| match own {
        Some(hook) => Ok(Some(hook.clone())),
        None => of_label(image, label),
    };
    let hooks = Hooks {
        before_freeze: or_labelled(&own.before_freeze, BEFORE_FREEZE)?,
        after_thaw: or_labelled(&own.after_thaw, AFTER_THAW)?,
    };
    match hooks.check() {
        Ok(()) => Ok(hooks),
        Err(why) => Err(malformed(&format!("its hooks are invalid: {why}"))),
    }
}

fn of_label(image: &ImageConfiguration, label: &str) -> Result<Option<Hook>, Error> {
    let value = image.labels_of_config().and_then(|labels| labels.get(label));
    let hook = value.map(|value| {
        let hook = serde_json::from_str(value);
        hook.map_err(|why| malformed(&format!("its label {label} is no hook: {why}")))
    });
    hook.transpose()
}

fn malformed(why: &str) -> Error {
    Error::new(
        ErrorKind::ImageMalformed,
        format!("the image cannot be used: {why}"),
    )
    .remedy("correct the label, or run it with --no-image-hooks (API: no_image_hooks)")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(labels: serde_json::Value) -> ImageConfiguration {
        let text = serde_json::json!({
            "architecture": "amd64", "os": "linux", "config": {"Labels": labels},
            "rootfs": {"type": "layers", "diff_ids": []},
        });
        ImageConfiguration::from_reader(text.to_string().as_bytes()).unwrap()
    }

    fn command(hook: &Option<Hook>) -> Option<&str> {
        hook.as_ref()?.command.as_ref()?.first().map(String::as_str)
    }

    #[test]
    fn callers_hook_replaces_that_of_the_image() {
        let image = image(serde_json::json!({
            BEFORE_FREEZE: r#"{"command":["/quiesce"]}"#,
            AFTER_THAW: r#"{"command":["/reseed"],"timeout_ms":5}"#,
        }));
        let asked = Hooks {
            before_freeze: None,
            after_thaw: Some(serde_json::from_str(r#"{"command":["/mine"]}"#).unwrap()),
        };
        let mut options = HookOptions {
            own: asked.clone(),
            ignore_image: false,
        };
        let both = of(&image, &options).unwrap();
        assert_eq!(command(&both.before_freeze), Some("/quiesce"));
        assert_eq!(command(&both.after_thaw), Some("/mine"));
        assert_eq!(both.after_thaw.unwrap().timeout_ms, Hook::TIMEOUT_MS);
        options.ignore_image = true;
        assert_eq!(of(&image, &options).unwrap(), asked);
    }

    #[test]
    fn invalid_hook_of_an_image_is_refused_by_its_label() {
        for (value, said) in [
            ("/reseed", AFTER_THAW),
            (r#"{"command":["x"],"retries":3}"#, "retries"),
            (r#"{"command":["x"],"timeout_ms":0}"#, "after_thaw.timeout_ms"),
            ("{}", "exactly one"),
        ] {
            let image = image(serde_json::json!({AFTER_THAW: value}));
            let refused = of(&image, &HookOptions::default()).unwrap_err();
            assert_eq!(refused.kind, ErrorKind::ImageMalformed);
            assert!(refused.to_string().contains(said), "{refused}");
            let without = HookOptions {
                ignore_image: true,
                ..HookOptions::default()
            };
            assert!(of(&image, &without).unwrap().is_none());
        }
    }
}
