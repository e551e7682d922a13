//! The health check of a container: that of its image, as docker's builders write it, changed by its caller.

use serde::Deserialize;
use thaw_protocol::api::HealthCheck;

/// The times of a check without its own, in milliseconds, and its retries.
const TIME_MS: u64 = 30_000;
const RETRIES: u32 = 3;
const NANOSECONDS: u64 = 1_000_000;

/// What a caller chose of a health check. What is `None` is the image's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthOptions {
    /// No check at all.
    pub disabled: bool,
    pub command: Option<Vec<String>>,
    pub interval_ms: Option<u64>,
    pub timeout_ms: Option<u64>,
    pub start_period_ms: Option<u64>,
    pub retries: Option<u32>,
}

impl From<HealthCheck> for HealthOptions {
    fn from(check: HealthCheck) -> HealthOptions {
        HealthOptions {
            disabled: false,
            command: Some(check.command),
            interval_ms: Some(check.interval_ms),
            timeout_ms: Some(check.timeout_ms),
            start_period_ms: Some(check.start_period_ms),
            retries: Some(check.retries),
        }
    }
}

/// The check of an image's configuration (docker's image specification 1.2, "Healthcheck"), which OCI's does not have.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct ImageCheck {
    test: Option<Vec<String>>,
    interval: Option<u64>,
    timeout: Option<u64>,
    start_period: Option<u64>,
    retries: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ImageConfig {
    config: Option<Container>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Container {
    healthcheck: Option<ImageCheck>,
}

/// The health check of a container whose image has this configuration, as JSON. `None` if it has none.
///
/// # Errors
/// What is invalid of the caller's, in words. An invalid one of the image counts as none.
pub fn health_check(image: Option<&[u8]>, options: &HealthOptions) -> Result<Option<HealthCheck>, String> {
    if options.disabled {
        return Ok(None);
    }
    let config = image.and_then(|json| serde_json::from_slice::<ImageConfig>(json).ok());
    let of_image = config.and_then(|c| c.config).and_then(|c| c.healthcheck);
    let of_image = of_image.unwrap_or_default();
    let command = options
        .command
        .clone()
        .or_else(|| command(of_image.test.as_deref()?));
    let Some(command) = command else {
        return Ok(None);
    };
    // In an image, 0 stands for the default.
    let time = |asked: Option<u64>, image: Option<u64>, default: u64| {
        let of_image = image
            .filter(|time| *time > 0)
            .map(|time| (time / NANOSECONDS).max(1));
        asked.or(of_image).unwrap_or(default)
    };
    let check = HealthCheck {
        command,
        interval_ms: time(options.interval_ms, of_image.interval, TIME_MS),
        timeout_ms: time(options.timeout_ms, of_image.timeout, TIME_MS),
        start_period_ms: time(options.start_period_ms, of_image.start_period, 0),
        retries: options
            .retries
            .or(of_image.retries.filter(|n| *n > 0))
            .unwrap_or(RETRIES),
    };
    match check.check() {
        Ok(()) => Ok(Some(check)),
        Err(_) if *options == HealthOptions::default() => Ok(None),
        Err(why) => Err(why),
    }
}

/// The command of a test: `["CMD", …]`, `["CMD-SHELL", line]`, or none.
fn command(test: &[String]) -> Option<Vec<String>> {
    match test.split_first()? {
        (kind, rest) if kind == "CMD" && !rest.is_empty() => Some(rest.to_vec()),
        (kind, [line, ..]) if kind == "CMD-SHELL" => Some(shell(line)),
        _ => None,
    }
}

/// A line for the container's shell.
pub fn shell(line: &str) -> Vec<String> {
    vec!["/bin/sh".into(), "-c".into(), line.into()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(image: &str, options: &HealthOptions) -> Option<HealthCheck> {
        health_check(Some(image.as_bytes()), options).unwrap()
    }

    const IMAGE: &str = r#"{"config":{"Healthcheck":{"Test":["CMD-SHELL","curl -f localhost"],"Interval":5000000000,"Retries":0}}}"#;

    #[test]
    fn check_of_an_image_has_dockers_defaults() {
        let check = of(IMAGE, &HealthOptions::default()).unwrap();
        assert_eq!(check.command, ["/bin/sh", "-c", "curl -f localhost"]);
        assert_eq!((check.interval_ms, check.timeout_ms), (5000, 30_000));
        assert_eq!((check.start_period_ms, check.retries), (0, 3));
        let exec = r#"{"config":{"Healthcheck":{"Test":["CMD","/probe","-x"]}}}"#;
        assert_eq!(
            of(exec, &HealthOptions::default()).unwrap().command,
            ["/probe", "-x"]
        );
    }

    #[test]
    fn caller_changes_or_disables_the_check_of_an_image() {
        let options = HealthOptions {
            retries: Some(1),
            ..HealthOptions::default()
        };
        let check = of(IMAGE, &options).unwrap();
        assert_eq!((check.retries, check.interval_ms), (1, 5000));
        let disabled = HealthOptions {
            disabled: true,
            ..options
        };
        assert_eq!(of(IMAGE, &disabled), None);
        let own = HealthOptions {
            command: Some(vec!["/x".into()]),
            timeout_ms: Some(0),
            ..HealthOptions::default()
        };
        assert!(health_check(None, &own).is_err());
    }

    #[test]
    fn image_without_a_valid_check_has_none() {
        for image in [
            "",
            "null",
            r#"{"config":null}"#,
            r#"{"config":{"Healthcheck":{"Test":["NONE"]}}}"#,
            r#"{"config":{"Healthcheck":{"Test":[]}}}"#,
            r#"{"config":{"Healthcheck":{"Test":["CMD"]}}}"#,
            r#"{"config":{"Healthcheck":{"Test":["CMD","a\u0000"]}}}"#,
            r#"{"config":{"Healthcheck":{"Test":["CMD","a"],"Interval":-1}}}"#,
        ] {
            assert_eq!(of(image, &HealthOptions::default()), None, "{image}");
        }
    }
}
