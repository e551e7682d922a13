//! Credentials, and how a registry wants them: the Docker configuration file, its credential helpers, and the
//! distribution specification's token and basic authentication.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use serde::Deserialize;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::error::Error;
use crate::reference::DEFAULT_REGISTRY;

/// Key under which Docker stores Docker Hub's credentials.
const HUB_KEY: &str = "https://index.docker.io/v1/";
const HELPER_TIMEOUT: Duration = Duration::from_secs(30);

/// The source of credentials for registries.
#[derive(Clone, Default)]
pub enum Credentials {
    /// `$DOCKER_CONFIG/config.json`, or `~/.docker/config.json`; `None` if there is no such file.
    #[default]
    DockerConfig,
    /// This configuration file.
    ConfigFile(PathBuf),
    /// No credentials.
    Anonymous,
    /// These, for any registry.
    Basic { user: String, password: String },
}

/// The credentials for one registry. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub enum Login {
    Anonymous,
    Basic {
        user: String,
        password: String,
    },
    /// An OAuth2 refresh token.
    Identity(String),
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Anonymous => "Anonymous",
            Self::Basic { .. } => "Basic(..)",
            Self::Identity(_) => "Identity(..)",
        })
    }
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Config {
    auths: HashMap<String, AuthEntry>,
    creds_store: Option<String>,
    cred_helpers: HashMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct AuthEntry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
}

impl Credentials {
    /// The login for `registry` (a host with its port, or `docker.io`).
    ///
    /// # Errors
    /// `Credentials` when the configuration or a helper it names is broken: guessing "anonymous" would hide it.
    pub async fn login(&self, registry: &str) -> Result<Login, Error> {
        let path = match self {
            Self::Anonymous => return Ok(Login::Anonymous),
            Self::Basic { user, password } => {
                return Ok(Login::Basic {
                    user: user.clone(),
                    password: password.clone(),
                });
            }
            Self::ConfigFile(path) => path.clone(),
            Self::DockerConfig => match default_config() {
                Some(path) if path.exists() => path,
                _ => return Ok(Login::Anonymous),
            },
        };
        let broken = |reason: String| Error::Credentials {
            registry: registry.into(),
            reason,
        };
        let text = std::fs::read(&path).map_err(|error| broken(format!("{}: {error}", path.display())))?;
        let config: Config =
            serde_json::from_slice(&text).map_err(|error| broken(format!("{}: {error}", path.display())))?;
        config.login(registry).await.map_err(broken)
    }
}

fn default_config() -> Option<PathBuf> {
    let directory = match std::env::var_os("DOCKER_CONFIG") {
        Some(directory) if !directory.is_empty() => PathBuf::from(directory),
        _ => Path::new(&std::env::var_os("HOME")?).join(".docker"),
    };
    Some(directory.join("config.json"))
}

/// The names under which a registry's credentials may be filed.
fn keys(registry: &str) -> Vec<String> {
    if registry == DEFAULT_REGISTRY {
        return vec![
            HUB_KEY.into(),
            "docker.io".into(),
            "index.docker.io".into(),
            "registry-1.docker.io".into(),
        ];
    }
    let mut keys = vec![registry.to_owned()];
    for scheme in ["https", "http"] {
        keys.extend(["", "/", "/v1/", "/v2/"].map(|end| format!("{scheme}://{registry}{end}")));
    }
    keys
}

impl Config {
    async fn login(&self, registry: &str) -> Result<Login, String> {
        let keys = keys(registry);
        if let Some((key, helper)) = keys
            .iter()
            .find_map(|key| Some((key, self.cred_helpers.get(key)?)))
        {
            return ask_helper(helper, key).await;
        }
        if let Some(entry) = keys.iter().find_map(|key| self.auths.get(key))
            && let Some(login) = entry.login()?
        {
            return Ok(login);
        }
        match &self.creds_store {
            Some(helper) => ask_helper(helper, &keys[0]).await,
            None => Ok(Login::Anonymous),
        }
    }
}

impl AuthEntry {
    /// Empty entries only mean that a credential store has the credentials.
    fn login(&self) -> Result<Option<Login>, String> {
        let some = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        if let Some(token) = some(&self.identitytoken) {
            return Ok(Some(Login::Identity(token)));
        }
        if let (Some(user), Some(password)) = (some(&self.username), some(&self.password)) {
            return Ok(Some(Login::Basic { user, password }));
        }
        let Some(auth) = some(&self.auth) else {
            return Ok(None);
        };
        let decoded = STANDARD
            .decode(&auth)
            .or_else(|_| STANDARD_NO_PAD.decode(&auth))
            .ok()
            .and_then(|bytes| String::from_utf8(bytes).ok());
        let (user, password) = decoded
            .as_deref()
            .and_then(|text| text.split_once(':'))
            .ok_or("its auth entry is not base64 of USER:PASSWORD")?;
        Ok(Some(Login::Basic {
            user: user.into(),
            password: password.trim_end_matches('\0').into(),
        }))
    }
}

/// The protocol of docker-credential-helpers: `get`, the server on stdin, JSON on stdout.
async fn ask_helper(helper: &str, server: &str) -> Result<Login, String> {
    if helper.is_empty()
        || !helper
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
    {
        return Err(format!("{helper:?} is no credential helper's name"));
    }
    ask(&format!("docker-credential-{helper}"), server).await
}

async fn ask(program: &str, server: &str) -> Result<Login, String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Answer {
        username: String,
        secret: String,
    }
    let failed = |error: std::io::Error| format!("{program}: {error}");
    let mut child = Command::new(program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A helper that exits without reading still reports its result on stdout.
        let _ = stdin.write_all(server.as_bytes()).await;
    }
    let output = tokio::time::timeout(HELPER_TIMEOUT, child.wait_with_output())
        .await
        .map_err(|_| format!("{program} did not answer within 30 s"))?
        .map_err(failed)?;
    if !output.status.success() {
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        if said.contains("credentials not found") {
            return Ok(Login::Anonymous);
        }
        return Err(format!(
            "{program} failed: {}",
            said.trim().chars().take(300).collect::<String>()
        ));
    }
    let answer: Answer =
        serde_json::from_slice(&output.stdout).map_err(|_| format!("{program} answered no JSON"))?;
    Ok(match answer.username.as_str() {
        "<token>" => Login::Identity(answer.secret),
        "" if answer.secret.is_empty() => Login::Anonymous,
        _ => Login::Basic {
            user: answer.username,
            password: answer.secret,
        },
    })
}

/// The challenge in a 401's `WWW-Authenticate`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Challenge {
    Basic,
    Bearer {
        realm: String,
        service: Option<String>,
        scope: Option<String>,
    },
}

impl Challenge {
    /// The best of the challenges that is understood.
    pub fn parse<'a>(headers: impl Iterator<Item = &'a str>) -> Option<Self> {
        let mut basic = None;
        for header in headers {
            for challenge in http_auth::parse_challenges(header).unwrap_or_default() {
                if challenge.scheme.eq_ignore_ascii_case("basic") {
                    basic = Some(Self::Basic);
                } else if challenge.scheme.eq_ignore_ascii_case("bearer") {
                    let parameter = |name: &str| {
                        let found = challenge
                            .params
                            .iter()
                            .find(|(key, _)| key.eq_ignore_ascii_case(name));
                        found.map(|(_, value)| value.to_unescaped())
                    };
                    if let Some(realm) = parameter("realm") {
                        let (service, scope) = (parameter("service"), parameter("scope"));
                        return Some(Self::Bearer {
                            realm,
                            service,
                            scope,
                        });
                    }
                }
            }
        }
        basic
    }
}

/// The value of an `Authorization` header for basic authentication.
pub fn basic(user: &str, password: &str) -> String {
    format!("Basic {}", STANDARD.encode(format!("{user}:{password}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        serde_json::from_str(text).unwrap()
    }

    #[tokio::test]
    async fn entries_of_the_docker_configuration() {
        let config = config(
            r#"{"auths": {"https://index.docker.io/v1/": {"auth": "aHViOnNlY3JldA=="},
                "host:5000": {"auth": "dTpwOnE="}, "https://old.example": {"username": "a", "password": "b"},
                "token.example": {"auth": "", "identitytoken": "refresh"}, "broken.example": {"auth": "!"},
                "empty.example": {}}, "HttpHeaders": {"x": "y"}}"#,
        );
        let basic = |user: &str, password: &str| Login::Basic {
            user: user.into(),
            password: password.into(),
        };
        assert_eq!(config.login("docker.io").await, Ok(basic("hub", "secret")));
        assert_eq!(config.login("host:5000").await, Ok(basic("u", "p:q")));
        assert_eq!(config.login("old.example").await, Ok(basic("a", "b")));
        assert_eq!(
            config.login("token.example").await,
            Ok(Login::Identity("refresh".into()))
        );
        assert_eq!(config.login("empty.example").await, Ok(Login::Anonymous));
        assert_eq!(config.login("other.example").await, Ok(Login::Anonymous));
        assert!(
            config
                .login("broken.example")
                .await
                .unwrap_err()
                .contains("base64")
        );
    }

    #[tokio::test]
    async fn a_helper_that_cannot_be_had_is_an_error() {
        let config = config(r#"{"credHelpers": {"a.example": "../sh", "b.example": "thaw-test-none"}}"#);
        assert!(
            config
                .login("a.example")
                .await
                .unwrap_err()
                .contains("helper's name")
        );
        assert!(
            config
                .login("b.example")
                .await
                .unwrap_err()
                .contains("docker-credential-thaw-test-none")
        );
    }

    /// A helper as the shell's child writes it: no other test's child can hold it open for writing.
    async fn helper(directory: &tempfile::TempDir, name: &str, script: &str) -> Result<Login, String> {
        let path = directory.path().join(name);
        let write = "printf '#!/bin/sh\\n%s\\n' \"$2\" > \"$1\" && chmod 755 \"$1\"";
        let status = Command::new("/bin/sh")
            .args(["-c", write, "sh"])
            .arg(&path)
            .arg(script)
            .status();
        assert!(status.await.unwrap().success());
        ask(path.to_str().unwrap(), "host:5000").await
    }

    #[tokio::test]
    async fn credential_helpers_are_asked() {
        let directory = tempfile::tempdir().unwrap();
        let echo = r#"read -r server; printf '{"Username":"%s","Secret":"%s"}' "$1" "$server""#;
        let basic = Login::Basic {
            user: "get".into(),
            password: "host:5000".into(),
        };
        assert_eq!(helper(&directory, "echo", echo).await, Ok(basic));
        let token = r#"cat > /dev/null; printf '{"Username":"<token>","Secret":"refresh"}'"#;
        assert_eq!(
            helper(&directory, "token", token).await,
            Ok(Login::Identity("refresh".into()))
        );
        let none = "echo credentials not found in native keychain; exit 1";
        assert_eq!(helper(&directory, "none", none).await, Ok(Login::Anonymous));
        assert!(
            helper(&directory, "broken", "echo locked >&2; exit 1")
                .await
                .unwrap_err()
                .contains("locked")
        );
        assert!(
            helper(&directory, "odd", "echo hello")
                .await
                .unwrap_err()
                .contains("no JSON")
        );
    }

    #[test]
    fn logins_are_never_printed() {
        let login = Login::Basic {
            user: "u".into(),
            password: "hunter2".into(),
        };
        assert!(!format!("{login:?}").contains("hunter2"));
    }

    #[test]
    fn challenges() {
        let header = r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:library/busybox:pull""#;
        assert_eq!(
            Challenge::parse([header].into_iter()),
            Some(Challenge::Bearer {
                realm: "https://auth.docker.io/token".into(),
                service: Some("registry.docker.io".into()),
                scope: Some("repository:library/busybox:pull".into()),
            })
        );
        assert_eq!(
            Challenge::parse(["Basic realm=\"x\""].into_iter()),
            Some(Challenge::Basic)
        );
        assert_eq!(Challenge::parse(["Negotiate", "\u{1}"].into_iter()), None);
    }
}
