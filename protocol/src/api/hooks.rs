//! Hooks of a container: what runs in it before a freeze and after a thaw, and how that ended.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::{MOST_PROBE_HOST, MOST_PROBE_PATH};

/// Valid time limits of hooks, in milliseconds.
pub const HOOK_MS: RangeInclusive<u32> = 1..=600_000;
/// Longest command of a hook, in bytes.
pub const MOST_HOOK_COMMAND: usize = 32 << 10;
/// Longest user of a hook, in bytes.
const MOST_USER: usize = 253;

/// What is run in a container before a freeze and after a thaw.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Hooks {
    /// Runs before the sandbox is frozen, also for a fork and for a pause that releases its memory. If it fails, the sandbox is not frozen
    /// and goes on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before_freeze: Option<Hook>,
    /// Runs in each sandbox that is thawed from a snapshot of this one, also in the clones of a fork and after a pause that released its
    /// memory, once it has its new identity, fresh entropy and its network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_thaw: Option<Hook>,
}

impl Hooks {
    /// Whether there is no hook.
    pub fn is_none(&self) -> bool {
        *self == Hooks::default()
    }

    /// Checks that the hooks are valid.
    ///
    /// # Errors
    /// What is invalid, in words.
    pub fn check(&self) -> Result<(), String> {
        if let Some(hook) = &self.before_freeze {
            hook.check().map_err(|why| format!("before_freeze.{why}"))?;
            if hook.on_failure != OnHookFailure::Continue {
                return Err("before_freeze.on_failure is continue: a failure only refuses the freeze".into());
            }
        }
        match &self.after_thaw {
            Some(hook) => hook.check().map_err(|why| format!("after_thaw.{why}")),
            None => Ok(()),
        }
    }
}

/// A command in the container, or a request to a program that listens in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Hook {
    /// A program and its arguments, with the container's environment and working directory. It succeeds if it exits with 0. Either this or
    /// `http`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<Vec<String>>,
    /// A POST request without a body. It succeeds if the status is 200 to 299.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<HookRequest>,
    /// `USER[:GROUP]` of the command, names or numbers. The container's user if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(max_length = 253))]
    pub user: Option<String>,
    /// How long it may take, in milliseconds; 10 s if absent. Then its process group is killed, and it has failed.
    #[serde(default = "ten_seconds")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 600000))]
    pub timeout_ms: u32,
    /// What happens to a thawed sandbox whose `after_thaw` hook fails.
    #[serde(default, skip_serializing_if = "OnHookFailure::is_continue")]
    pub on_failure: OnHookFailure,
}

impl Hook {
    /// The time limit of a hook that names none, in milliseconds.
    pub const TIMEOUT_MS: u32 = 10_000;

    /// Checks that the hook is valid.
    ///
    /// # Errors
    /// What is invalid, in words: the field comes first.
    pub fn check(&self) -> Result<(), String> {
        match (&self.command, &self.http) {
            (Some(command), None) => check_command(command)?,
            (None, Some(http)) => http.check().map_err(|why| format!("http.{why}"))?,
            _ => return Err("command and http: it has exactly one of them".into()),
        }
        if let Some(user) = &self.user {
            if self.http.is_some() {
                return Err("user is of a command, and not of http".into());
            }
            if user.is_empty() || user.len() > MOST_USER || user.contains(char::is_control) {
                return Err(format!(
                    "user is 1 to {MOST_USER} bytes without control characters"
                ));
            }
        }
        match HOOK_MS.contains(&self.timeout_ms) {
            true => Ok(()),
            false => Err(format!(
                "timeout_ms is {}; it may be {} to {}",
                self.timeout_ms,
                HOOK_MS.start(),
                HOOK_MS.end()
            )),
        }
    }
}

fn check_command(command: &[String]) -> Result<(), String> {
    let length: usize = command.iter().map(String::len).sum();
    if command.first().is_none_or(String::is_empty) || command.iter().any(|word| word.contains('\0')) {
        return Err("command is not a program and its arguments, without NUL".into());
    }
    match length > MOST_HOOK_COMMAND {
        true => Err(format!("command is at most {MOST_HOOK_COMMAND} bytes")),
        false => Ok(()),
    }
}

/// A request to a port of the guest's `localhost`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct HookRequest {
    /// 1 to 65535.
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub port: u16,
    /// From its first `/` on; `/` if absent.
    #[serde(default = "root")]
    #[cfg_attr(feature = "openapi", schema(max_length = 1024, pattern = "^/[!-~]*$"))]
    pub path: String,
    /// The `Host` header; `localhost` and the port if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(max_length = 253, pattern = "^[!-~]+$"))]
    pub host: Option<String>,
}

impl HookRequest {
    fn check(&self) -> Result<(), String> {
        let word = |text: &str| text.bytes().all(|b| b.is_ascii_graphic());
        if self.port == 0 {
            return Err("port is 0; it may be 1 to 65535".into());
        }
        if !self.path.starts_with('/') || !word(&self.path) || self.path.len() > MOST_PROBE_PATH {
            return Err(format!(
                "path begins with / and is of printable ASCII, at most {MOST_PROBE_PATH} characters"
            ));
        }
        match &self.host {
            Some(host) if host.is_empty() || !word(host) || host.len() > MOST_PROBE_HOST => Err(format!(
                "host is of printable ASCII, 1 to {MOST_PROBE_HOST} characters"
            )),
            _ => Ok(()),
        }
    }
}

/// What happens to a thawed sandbox whose `after_thaw` hook fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnHookFailure {
    /// It goes on. Its description says how the hook failed.
    #[default]
    Continue,
    /// It ends, and the thaw fails. After a pause that released its memory it stays paused.
    End,
}

impl OnHookFailure {
    fn is_continue(&self) -> bool {
        *self == OnHookFailure::Continue
    }
}

/// How a hook ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HookResult {
    /// Why it failed, a sentence for people. Absent if it succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// How long it took, in milliseconds.
    pub took_ms: u64,
    /// The last 4096 bytes of what the command wrote, or the first 4096 of the answer's body.
    pub output: String,
}

fn ten_seconds() -> u32 {
    Hook::TIMEOUT_MS
}

fn root() -> String {
    "/".into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(json: &str) -> Result<(), String> {
        serde_json::from_str::<Hooks>(json)
            .map_err(|e| e.to_string())?
            .check()
    }

    #[test]
    fn hooks_are_one_command_or_request_within_bounds() {
        for good in [
            "{}",
            r#"{"before_freeze":{"command":["/bin/sync"]}}"#,
            r#"{"after_thaw":{"command":["x","y"],"user":"33:33","timeout_ms":600000,"on_failure":"end"}}"#,
            r#"{"after_thaw":{"http":{"port":80,"path":"/a?b=c","host":"app:81"}}}"#,
        ] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for (bad, word) in [
            (r#"{"before_freeze":{}}"#, "before_freeze.command"),
            (
                r#"{"after_thaw":{"command":["a"],"http":{"port":1}}}"#,
                "exactly one",
            ),
            (r#"{"after_thaw":{"command":[]}}"#, "after_thaw.command"),
            (r#"{"after_thaw":{"command":[""]}}"#, "program"),
            (r#"{"after_thaw":{"command":["a","\u0000"]}}"#, "NUL"),
            (r#"{"after_thaw":{"command":["a"],"user":""}}"#, "after_thaw.user"),
            (r#"{"after_thaw":{"command":["a"],"user":"a\nb"}}"#, "user"),
            (r#"{"after_thaw":{"http":{"port":1},"user":"a"}}"#, "user"),
            (r#"{"after_thaw":{"http":{"port":0}}}"#, "http.port"),
            (r#"{"after_thaw":{"http":{"port":1,"path":"a"}}}"#, "http.path"),
            (
                r#"{"after_thaw":{"http":{"port":1,"path":"/a\r\nX: y"}}}"#,
                "http.path",
            ),
            (r#"{"after_thaw":{"http":{"port":1,"host":""}}}"#, "http.host"),
            (r#"{"after_thaw":{"command":["a"],"timeout_ms":0}}"#, "timeout_ms"),
            (
                r#"{"after_thaw":{"command":["a"],"timeout_ms":600001}}"#,
                "timeout_ms",
            ),
            (
                r#"{"before_freeze":{"command":["a"],"on_failure":"end"}}"#,
                "on_failure",
            ),
            (r#"{"before_thaw":{"command":["a"]}}"#, "before_thaw"),
        ] {
            let said = check(bad).unwrap_err();
            assert!(said.contains(word), "{bad}: {said}");
        }
        let long = Hook {
            command: Some(vec!["x".repeat(MOST_HOOK_COMMAND + 1)]),
            ..serde_json::from_str(r#"{"command":["a"]}"#).unwrap()
        };
        assert!(long.check().unwrap_err().contains("at most"));
    }
}
