//! The flags of `thaw run` for the hooks of its container.

use clap::Args;
use thaw_protocol::api::{HOOK_MS, Hook, HookRequest, Hooks, OnHookFailure};
use thaw_sandbox::container::{HookOptions, shell};

use super::health::parse_time;

#[derive(Debug, Args)]
#[command(next_help_heading = "Hooks of a freeze and a thaw")]
pub struct HookArguments {
    /// Run this before the sandbox is frozen, forked, or paused with its memory released; if it fails, the sandbox is not frozen and goes
    /// on. A line for the container's shell; a JSON array of a program and its arguments; or `http:PORT[/PATH]`, a POST request to
    /// localhost that is answered with 200 to 299 [default: the image's]
    #[arg(long, value_name = "HOOK", value_parser = parse_hook)]
    pub before_freeze: Option<Hook>,
    /// Run this in each sandbox that is thawed from it, once it has its new identity, entropy and network: here a program renews
    /// what clones must not share [default: the image's]
    #[arg(long, value_name = "HOOK", value_parser = parse_hook)]
    pub after_thaw: Option<Hook>,
    /// How long each of these hooks may take, at most 10m: then its process group is killed, and it has failed [default: 10s]
    #[arg(long, value_name = "TIME", value_parser = parse_limit)]
    pub hook_timeout: Option<u32>,
    /// The user of the hooks' commands: USER[:GROUP], names or numbers [default: the container's]
    #[arg(long, value_name = "USER", value_parser = parse_user)]
    pub hook_user: Option<String>,
    /// End a thawed sandbox whose hook of --after-thaw fails, instead of letting it go on
    #[arg(long, requires = "after_thaw")]
    pub end_if_hook_fails: bool,
    /// Ignore the hooks in the image's labels run.thaw.before-freeze and run.thaw.after-thaw
    #[arg(long)]
    pub no_image_hooks: bool,
}

impl HookArguments {
    /// The hooks of the flags.
    pub(crate) fn options(&self) -> HookOptions {
        let with = |hook: &Hook, on_failure| Hook {
            timeout_ms: self.hook_timeout.unwrap_or(Hook::TIMEOUT_MS),
            user: match hook.http {
                Some(_) => None,
                None => self.hook_user.clone(),
            },
            on_failure,
            ..hook.clone()
        };
        let on_failure = match self.end_if_hook_fails {
            true => OnHookFailure::End,
            false => OnHookFailure::Continue,
        };
        let before_freeze = self.before_freeze.as_ref();
        HookOptions {
            own: Hooks {
                before_freeze: before_freeze.map(|hook| with(hook, OnHookFailure::Continue)),
                after_thaw: self.after_thaw.as_ref().map(|hook| with(hook, on_failure)),
            },
            ignore_image: self.no_image_hooks,
        }
    }
}

fn parse_hook(text: &str) -> Result<Hook, String> {
    if text.is_empty() {
        return Err("a hook is not empty".into());
    }
    let (command, http) = match (text.strip_prefix("http:"), text.starts_with('[')) {
        (Some(place), _) => (None, Some(parse_request(place)?)),
        (None, true) => {
            let words = serde_json::from_str(text);
            let words = words.map_err(|e| format!("no JSON array of a program and its arguments: {e}"))?;
            (Some(words), None)
        }
        (None, false) => (Some(shell(text)), None),
    };
    let hook = Hook {
        command,
        http,
        user: None,
        timeout_ms: Hook::TIMEOUT_MS,
        on_failure: OnHookFailure::default(),
    };
    hook.check().map(|()| hook)
}

fn parse_request(place: &str) -> Result<HookRequest, String> {
    let (port, path) = place.split_at(place.find('/').unwrap_or(place.len()));
    let port = port.parse().ok().filter(|port| *port != 0);
    Ok(HookRequest {
        port: port.ok_or("a port, 1 to 65535, comes after http: as in http:8080/thawed")?,
        path: if path.is_empty() { "/" } else { path }.into(),
        host: None,
    })
}

fn parse_user(text: &str) -> Result<String, String> {
    let hook = Hook {
        user: Some(text.into()),
        ..parse_hook("true")?
    };
    hook.check().map(|()| text.into())
}

fn parse_limit(text: &str) -> Result<u32, String> {
    let limit = parse_time(text)?;
    let limit = u32::try_from(limit).ok().filter(|ms| HOOK_MS.contains(ms));
    limit.ok_or_else(|| "a time from 1ms to 10m".into())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        hooks: HookArguments,
    }

    fn hooks(flags: &[&str]) -> Result<Hooks, String> {
        let parsed = Flags::try_parse_from([&["x"], flags].concat());
        let hooks = parsed.map_err(|e| e.to_string())?.hooks.options().own;
        hooks.check().map(|()| hooks)
    }

    #[test]
    fn hook_is_a_line_an_array_or_a_request() {
        assert!(hooks(&[]).unwrap().is_none());
        let given = hooks(&[
            "--before-freeze",
            "sync && echo",
            "--after-thaw",
            r#"["/reseed", "-x"]"#,
            "--hook-timeout",
            "1m30s",
            "--hook-user",
            "0",
            "--end-if-hook-fails",
        ]);
        let given = given.unwrap();
        let (before, after) = (given.before_freeze.unwrap(), given.after_thaw.unwrap());
        assert_eq!(before.command.unwrap(), ["/bin/sh", "-c", "sync && echo"]);
        assert_eq!(before.on_failure, OnHookFailure::Continue);
        assert_eq!(after.command.unwrap(), ["/reseed", "-x"]);
        assert_eq!((after.timeout_ms, after.user.as_deref()), (90_000, Some("0")));
        assert_eq!(after.on_failure, OnHookFailure::End);
        for (text, port, path) in [("http:80", 80, "/"), ("http:8080/a?b", 8080, "/a?b")] {
            let hook = hooks(&["--after-thaw", text, "--hook-user", "0"]).unwrap();
            let hook = hook.after_thaw.unwrap();
            let http = hook.http.unwrap();
            assert_eq!(
                (http.port, http.path.as_str(), hook.user),
                (port, path, None),
                "{text}"
            );
        }
    }

    #[test]
    fn invalid_hook_flags_are_refused() {
        for wrong in [
            &["--after-thaw", ""][..],
            &["--after-thaw", "[]"],
            &["--after-thaw", "[1]"],
            &["--after-thaw", "http:0/x"],
            &["--after-thaw", "http:/x"],
            &["--after-thaw", "http:80/a b"],
            &["--after-thaw", "x", "--hook-timeout", "0s"],
            &["--after-thaw", "x", "--hook-timeout", "11m"],
            &["--after-thaw", "x", "--hook-user", ""],
            &["--before-freeze", "x", "--end-if-hook-fails"],
        ] {
            assert!(hooks(wrong).is_err(), "{wrong:?}");
        }
    }
}
