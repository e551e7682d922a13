//! E2B's Python SDK beside thawd's own API, and requests through the gateway beside requests to the sandbox's address: each pair in turn,
//! by the one [`Driver`].

use serde_json::{Value, json};
use thaw_tiny_node::Place;
use thaw_tiny_node::daemon::log;

use super::driver::{Driver, ms};
use super::{Addresses, relay};
use crate::Report;
use crate::clock::{progress, ran_ms};
use crate::create::Node;
use crate::report::mib;
use crate::snapshot::server::failed;

/// The machine of a sandbox. That of both APIs' creations must be the same.
const CPUS: u8 = 1;
const MEMORY_MIB: u32 = 256;
/// How long a sandbox may live, seconds.
const TIMEOUT_S: u32 = 43_200;
/// Creations after which the templates are there.
const WARM_UP: usize = 4;

/// What can be measured alone.
pub const PARTS: [&str; 5] = ["creations", "commands", "small", "downloads", "resumes"];

const SDK_CREATED: &str = "E2B's SDK: Sandbox.create";
const API_CREATED: &str = "thawd's API: POST /v1/sandboxes";
const SDK_RAN: &str = "E2B's SDK: commands.run(\"true\")";
const API_RAN: &str = "thawd's API: POST …/exec of the same";
const GATEWAY_SMALL: &str = "small request through the gateway";
const DIRECT_SMALL: &str = "small request to the sandbox's address";
const RELAYED_SMALL: &str = "small request through a relay";
const GATEWAY_RAN: &str = "small request through the gateway: of it, thawd runs";
const RESUMED_BY_REQUEST: &str = "request to a paused sandbox";
const RESUMED_EXPLICITLY: &str = "resume of a paused sandbox, and a request";

/// How often each is measured.
#[derive(Clone, Copy, Debug)]
pub struct Rounds {
    pub creations: usize,
    pub commands: usize,
    pub small: usize,
    pub downloads: usize,
    /// Bytes of a download.
    pub bytes: u64,
    pub resumes: usize,
}

/// A node that serves both APIs, and their caller.
pub struct Service {
    node: Node,
    driver: Driver,
    /// The body of a creation by thawd's own API.
    creation: Value,
}

impl Service {
    /// Starts both. E2B's template is of this image.
    pub fn start(place: Place, image: &str) -> Result<Service, String> {
        let addresses = Addresses::free()?;
        let apis = addresses.configuration(&place)?;
        place.configure(&format!(
            "{apis}[e2b.templates.base]\nimage = {image:?}\ncpus = {CPUS}\nmemory_mib = {MEMORY_MIB}\n"
        ));
        Ok(Service {
            node: Node::configured(place)?,
            driver: Driver::start(addresses)?,
            // As E2B's API makes it of the template.
            creation: json!({
                "image": image, "cpus": CPUS, "memory_mib": MEMORY_MIB, "timeout_s": TIMEOUT_S,
                "container": {
                    "entrypoint": "", "command": ["sleep", "infinity"], "on_exit": "delete", "settings": {"init": true},
                },
            }),
        })
    }

    /// Measures these of [`PARTS`], and keeps the report after each.
    ///
    /// # Errors
    /// Something failed, or was not answered as it must be; with the last lines of thawd's log.
    pub async fn measure(
        mut self,
        parts: &[&str],
        rounds: &Rounds,
        report: &mut Report,
    ) -> Result<(), String> {
        let measured = self.measure_each(parts, rounds, report).await;
        measured.map_err(|e| format!("{e}; thawd: {}", log(&self.node.place)))?;
        self.driver.end()?;
        self.node.stop();
        Ok(())
    }

    async fn measure_each(
        &mut self,
        parts: &[&str],
        rounds: &Rounds,
        report: &mut Report,
    ) -> Result<(), String> {
        let said = |what: &str| progress("bench-service-linux", what);
        let mut serves = false;
        for part in parts {
            if *part != "creations" && !serves {
                said("a server in a sandbox");
                let served = self.driver.ask(&json!({"do": "serve"}))?;
                let server = served["address"]
                    .as_str()
                    .and_then(|address| address.parse().ok());
                let relay = relay::start(server.ok_or("a server without an address")?);
                let relay = relay.map_err(|e| format!("the relay: {e}"))?;
                self.driver
                    .ask(&json!({"do": "use_relay", "address": relay.to_string()}))?;
                self.node.settle().await?;
                serves = true;
            }
            said(part);
            match *part {
                "creations" => self.creations(rounds.creations, report).await?,
                "commands" => self.commands(rounds.commands, report)?,
                "small" => self.small(rounds.small, report)?,
                "downloads" => self.downloads(rounds.downloads, rounds.bytes, report)?,
                "resumes" => self.resumes(rounds.resumes, report).await?,
                other => return Err(format!("nothing is called {other}")),
            }
            report.keep()?;
        }
        match serves {
            true => self.driver.ask(&json!({"do": "kill"})).map(drop),
            false => Ok(()),
        }
    }

    /// Creations by both APIs. Each begins when the pools do nothing.
    async fn creations(&mut self, rounds: usize, report: &mut Report) -> Result<(), String> {
        let ways = [
            (SDK_CREATED, json!({"do": "create_sdk"})),
            (API_CREATED, json!({"do": "create_api", "body": self.creation})),
        ];
        for round in 0..WARM_UP + rounds {
            for (series, request) in &ways {
                self.node.settle().await?;
                let made = self.driver.ask(request)?;
                if round >= WARM_UP {
                    report.sample(series, "ms", ms(&made)?);
                }
                let id = made["id"].as_str().ok_or("a creation without an id")?;
                self.node.client.delete(id).await.map_err(failed)?;
            }
        }
        report.ratio("sdk_create_over_api_create", SDK_CREATED, API_CREATED)
    }

    /// A command that does nothing, by both APIs.
    fn commands(&mut self, rounds: usize, report: &mut Report) -> Result<(), String> {
        let ways = [
            (SDK_RAN, json!({"do": "command_sdk"})),
            (API_RAN, json!({"do": "command_api"})),
        ];
        self.in_turn(rounds, &ways, |series, ms| report.sample(series, "ms", ms))?;
        report.ratio("sdk_command_over_exec", SDK_RAN, API_RAN)
    }

    /// Small requests to the server in the sandbox, all ways.
    fn small(&mut self, rounds: usize, report: &mut Report) -> Result<(), String> {
        self.driver.ask(&json!({"do": "connect_all"}))?;
        let ways = [
            (GATEWAY_SMALL, "gateway"),
            (DIRECT_SMALL, "direct"),
            (RELAYED_SMALL, "relay"),
        ]
        .map(|(series, way)| (series, json!({"do": "small", "way": way})));
        let before = self.node_ran()?;
        self.in_turn(rounds, &ways, |series, ms| report.sample(series, "ms", ms))?;
        // The warm-up ran too.
        let ran = (self.node_ran()? - before) / (rounds + 1) as f64;
        report.sample(GATEWAY_RAN, "ms", ran);
        self.driver.ask(&json!({"do": "disconnect_all"}))?;
        report.ratio("gateway_rtt_over_relay", GATEWAY_SMALL, RELAYED_SMALL)?;
        report.ratio("relay_rtt_over_direct", RELAYED_SMALL, DIRECT_SMALL)?;
        report.ratio("gateway_rtt_over_direct", GATEWAY_SMALL, DIRECT_SMALL)
    }

    /// Downloads of so many bytes, all ways.
    fn downloads(&mut self, rounds: usize, bytes: u64, report: &mut Report) -> Result<(), String> {
        let mib = mib(bytes);
        let gateway = format!("download of {mib:.0} MiB through the gateway");
        let direct = format!("download of {mib:.0} MiB from the sandbox's address");
        let relayed = format!("download of {mib:.0} MiB through a relay");
        let ways = [(&*gateway, "gateway"), (&*direct, "direct"), (&*relayed, "relay")]
            .map(|(series, way)| (series, json!({"do": "download", "way": way, "count": bytes})));
        self.in_turn(rounds, &ways, |series, ms| {
            report.sample(series, "MiB/s", mib / (ms / 1e3));
        })?;
        report.ratio("gateway_throughput_over_relay", &gateway, &relayed)?;
        report.ratio("relay_throughput_over_direct", &relayed, &direct)?;
        report.ratio("gateway_throughput_over_direct", &gateway, &direct)
    }

    /// Pauses the sandbox that serves, which releases its memory, and has it resumed either way.
    async fn resumes(&mut self, rounds: usize, report: &mut Report) -> Result<(), String> {
        for round in 0..=rounds {
            for (series, explicitly) in [(RESUMED_BY_REQUEST, false), (RESUMED_EXPLICITLY, true)] {
                self.driver.ask(&json!({"do": "pause"}))?;
                self.node.settle().await?;
                let ms = self
                    .driver
                    .ms(&json!({"do": "resume", "explicitly": explicitly}))?;
                // The first round warms up.
                if round > 0 {
                    report.sample(series, "ms", ms);
                }
            }
        }
        report.ratio(
            "resume_on_request_over_resume",
            RESUMED_BY_REQUEST,
            RESUMED_EXPLICITLY,
        )
    }

    /// How long thawd has run on processors, ms.
    fn node_ran(&self) -> Result<f64, String> {
        ran_ms(self.node.thawd.record().pid)
    }

    /// Has the driver do each of these in turn, and once more at first to warm up. `taken` is called with the others' times, ms.
    fn in_turn(
        &mut self,
        rounds: usize,
        requests: &[(&str, Value)],
        mut taken: impl FnMut(&str, f64),
    ) -> Result<(), String> {
        for round in 0..=rounds {
            for (series, request) in requests {
                let ms = self.driver.ms(request)?;
                if round > 0 {
                    taken(series, ms);
                }
            }
        }
        Ok(())
    }
}

/// What a reader of the report must know.
pub fn notes(report: &mut Report) {
    report.note(format!(
        "One caller, one request at a time, over loopback without TLS; the sandbox is a Linux guest of {MEMORY_MIB} MiB with Python's image. The \
         SDK is E2B's of Python, unchanged. Both sides of each ratio are timed by one Python program, from the call to the parsed answer, so \
         the interpreter is in both; what is not the SDK's is sent by Python's `http.client`. All answers are checked after their times \
         were taken. Connections to a control plane are open before a time begins.",
    ));
    report.note(
        "Creations: of one template by both APIs, in turn, each from full pools. The SDK's sends an idempotency key, so thawd also keeps its \
         answer. Commands: both run `/bin/bash -l -c true`; the SDK reads a stream of events, thawd's API answers once.",
    );
    report.note(
        "Requests through the gateway name the sandbox by its host name. Their connection to thawd stays open, and thawd's to the guest for a \
         second after each; direct requests use one connection that stays open. Downloads begin on a connection that was used before.",
    );
    report.note(
        "Both resumes are of one sandbox whose memory was released, and begin with a new connection to the gateway: either with the request \
         that resumes it, or with E2B's `POST /sandboxes/{id}/resume` and, after its answer, the same request. They end with the server's answer.",
    );
}
