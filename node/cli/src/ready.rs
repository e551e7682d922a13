//! The readiness flags of `thaw run`.

use clap::Args;
use thaw_protocol::api::{HttpProbe, ReadinessProbe, TcpProbe};
use thaw_sandbox::container::ready;
use thaw_sandbox::error::{Error, ErrorKind};

/// The readiness probe of a container.
#[derive(Debug, Default, Args)]
pub struct ReadyArguments {
    /// Fail and remove the sandbox unless the container accepts connections on this port in time; with -d, wait for that
    #[arg(long, value_name = "PORT", group = "ready", value_parser = clap::value_parser!(u16).range(1..))]
    pub ready_tcp: Option<u16>,
    /// The same, unless a GET request for this gets a status from 200 to 399; without /PATH, for /. The host of a URL becomes
    /// the Host header; the request goes to the container all the same
    #[arg(long, value_name = "PORT[/PATH]|http://HOST:PORT[/PATH]", group = "ready", value_parser = parse_http)]
    pub ready_http: Option<HttpProbe>,
    /// How long the container may take to become ready, 1 to 3600 [default: 30]
    #[arg(long, value_name = "SECONDS", requires = "ready", value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub ready_timeout: Option<u32>,
}

impl ReadyArguments {
    /// The probe of the flags; `None` without flags.
    pub(super) fn probe(&self) -> Result<Option<ReadinessProbe>, Error> {
        let tcp = self.ready_tcp.map(|port| TcpProbe { port });
        if tcp.is_none() && self.ready_http.is_none() {
            return Ok(None);
        }
        let probe = ReadinessProbe {
            tcp,
            http: self.ready_http.clone(),
            timeout_s: self.ready_timeout.unwrap_or(ReadinessProbe::TIMEOUT_S),
            period_ms: ReadinessProbe::PERIOD_MS,
        };
        let wrong = |e| Error::new(ErrorKind::Runtime, format!("the readiness probe cannot be: {e}"));
        ready::check(&probe).map_err(wrong)?;
        Ok(Some(probe))
    }
}

fn parse_http(text: &str) -> Result<HttpProbe, String> {
    let (whose, path) = {
        let rest = text.strip_prefix("http://").unwrap_or(text);
        rest.split_at(rest.find('/').unwrap_or(rest.len()))
    };
    if !text.starts_with("http://") {
        return read(whose, path, None);
    }
    let (host, port) = whose
        .rsplit_once(':')
        .ok_or("a URL has a port here: http://HOST:PORT/PATH")?;
    read(port, path, (!host.is_empty()).then(|| whose.to_owned()))
}

fn read(port: &str, path: &str, host: Option<String>) -> Result<HttpProbe, String> {
    let port = port.parse().ok().filter(|port| *port != 0);
    let probe = HttpProbe {
        port: port.ok_or("a port, 1 to 65535, comes first: 8080/healthz")?,
        path: if path.is_empty() { "/" } else { path }.into(),
        host,
    };
    let whole = ReadinessProbe {
        tcp: None,
        http: Some(probe.clone()),
        timeout_s: ReadinessProbe::TIMEOUT_S,
        period_ms: ReadinessProbe::PERIOD_MS,
    };
    ready::check(&whole).map(|()| probe)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        ready: ReadyArguments,
    }

    fn probe(flags: &[&str]) -> Result<Option<ReadinessProbe>, clap::Error> {
        let parsed = Flags::try_parse_from([&["x"], flags].concat())?;
        Ok(parsed.ready.probe().unwrap())
    }

    #[test]
    fn flags_make_one_probe_or_none() {
        assert_eq!(probe(&[]).unwrap(), None);
        let tcp = probe(&["--ready-tcp", "8080", "--ready-timeout", "5"])
            .unwrap()
            .unwrap();
        assert_eq!((tcp.tcp, tcp.timeout_s), (Some(TcpProbe { port: 8080 }), 5));
        for (text, port, path, host) in [
            ("8080", 8080, "/", None),
            ("8080/", 8080, "/", None),
            ("8080/healthz?full=1", 8080, "/healthz?full=1", None),
            ("http://app.example:80/a/b", 80, "/a/b", Some("app.example:80")),
            ("http://app.example:80", 80, "/", Some("app.example:80")),
            ("http://:8080/x", 8080, "/x", None),
        ] {
            let http = probe(&["--ready-http", text]).unwrap().unwrap().http.unwrap();
            let got = (http.port, http.path.as_str(), http.host.as_deref());
            assert_eq!(got, (port, path, host), "{text}");
        }
        for wrong in [
            &["--ready-tcp", "0"][..],
            &["--ready-tcp", "65536"],
            &["--ready-tcp", "1", "--ready-http", "1"],
            &["--ready-timeout", "5"],
            &["--ready-tcp", "1", "--ready-timeout", "0"],
            &["--ready-http", "/healthz"],
            &["--ready-http", "0/x"],
            &["--ready-http", "80/a b"],
            &["--ready-http", "https://x:443/"],
            &["--ready-http", "http://x/"],
        ] {
            assert!(probe(wrong).is_err(), "{wrong:?}");
        }
    }
}
