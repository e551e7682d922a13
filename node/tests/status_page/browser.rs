//! A headless Chromium, driven by the DevTools protocol over a pair of pipes: JSON messages that end with a zero byte.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

/// Chromium expects the pipes as descriptors 3 and 4. It ends with them, and in any case after two minutes.
const START: &str = "exec timeout 120 chromium --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars \
                     --user-data-dir=\"$0\" --remote-debugging-pipe about:blank 3<&0 4>&1 </dev/null >/dev/null 2>&1";

/// Whether Chromium is installed.
pub fn is_installed() -> bool {
    Path::new("/usr/bin/chromium").exists()
}

/// A browser. It ends when this is dropped.
pub struct Browser {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
    last_id: u64,
}

/// One page of the browser.
pub struct Page<'a> {
    browser: &'a mut Browser,
    session: String,
}

impl Browser {
    /// Starts one that keeps its files in `directory`.
    pub fn start(directory: &Path) -> Browser {
        let mut command = Command::new("sh");
        command.args(["-c", START]).arg(directory);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Browser {
            requests: child.stdin.take().unwrap(),
            answers: BufReader::new(child.stdout.take().unwrap()),
            child,
            last_id: 0,
        }
    }

    /// Opens a page in a window of this size, pixels.
    pub fn open(&mut self, address: &str, (width, height): (u32, u32)) -> Page<'_> {
        let target = self.call(None, "Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = self.call(None, "Target.attachToTarget", attach)["sessionId"].clone();
        let mut page = Page {
            browser: self,
            session: session.as_str().unwrap().to_owned(),
        };
        let window = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        page.call("Emulation.setDeviceMetricsOverride", window);
        page.call("Page.navigate", json!({ "url": address }));
        page
    }

    fn call(&mut self, session: Option<&str>, method: &str, parameters: Value) -> Value {
        self.last_id += 1;
        let mut request = json!({"id": self.last_id, "method": method, "params": parameters});
        if let Some(session) = session {
            request["sessionId"] = session.into();
        }
        let mut bytes = request.to_string().into_bytes();
        bytes.push(0);
        self.requests.write_all(&bytes).unwrap();
        loop {
            let mut message = Vec::new();
            self.answers.read_until(0, &mut message).unwrap();
            assert_eq!(message.pop(), Some(0), "Chromium ended during {method}");
            let message: Value = serde_json::from_slice(&message).unwrap();
            // The others are events.
            if message["id"] == self.last_id {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].clone();
            }
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Page<'_> {
    fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.browser.call(Some(&self.session), method, parameters)
    }

    /// The value of an expression of JavaScript in the page; null if it fails.
    pub fn value(&mut self, expression: &str) -> Value {
        let evaluate =
            json!({"expression": expression, "returnByValue": true, "allowUnsafeEvalBlockedByCSP": false});
        self.call("Runtime.evaluate", evaluate)["result"]["value"].clone()
    }

    /// A PNG of what the window shows.
    pub fn screenshot(&mut self) -> Vec<u8> {
        let shot = self.call("Page.captureScreenshot", json!({"format": "png"}));
        BASE64_STANDARD.decode(shot["data"].as_str().unwrap()).unwrap()
    }
}
