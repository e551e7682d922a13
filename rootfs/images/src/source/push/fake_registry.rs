//! A registry one can push to, in memory: the answers that the distribution specification asks for, and faults.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use thaw_imagefs::digest::Digest;

use crate::source::fixture::{Answer, Asked};

/// The state of the registry.
#[derive(Default)]
pub(super) struct State {
    pub(super) blobs: BTreeMap<Digest, Vec<u8>>,
    /// By tag and by digest.
    pub(super) manifests: BTreeMap<String, (String, Vec<u8>)>,
    pub(super) uploads: BTreeMap<String, Vec<u8>>,
    /// What another repository has.
    pub(super) others: BTreeMap<Digest, Vec<u8>>,
    pub(super) knows_referrers: bool,
    pub(super) absolute: bool,
    /// Answered to the next requests of a method, in their order.
    pub(super) faults: Vec<(&'static str, u16)>,
    /// How much of a refused chunk is kept.
    pub(super) kept: usize,
    pub(super) chunk: Option<u64>,
    pub(super) password: bool,
}

fn query(path: &str, name: &str) -> Option<String> {
    let url = reqwest::Url::parse(&format!("http://x{path}")).unwrap();
    url.query_pairs()
        .find(|(key, _)| key == name)
        .map(|(_, value)| value.into_owned())
}

impl State {
    fn location(&self, asked: &Asked, id: &str) -> String {
        let path = format!("/v2/app/blobs/uploads/{id}?state=a%2Bb");
        if self.absolute {
            format!("http://{}{path}", asked.headers["host"])
        } else {
            path
        }
    }

    fn fault(&mut self, asked: &Asked) -> Option<u16> {
        let at = self
            .faults
            .iter()
            .position(|(method, _)| *method == asked.method)?;
        Some(self.faults.remove(at).1)
    }

    pub(super) fn answer(&mut self, asked: &Asked) -> Answer {
        if self.password && !asked.headers.contains_key("authorization") {
            return Answer::new(401, "").header("www-authenticate", "Basic realm=\"x\"");
        }
        let path = asked.path.split('?').next().unwrap();
        let last = path.rsplit('/').next().unwrap();
        let is_upload = path.contains("/uploads/");
        match asked.method.as_str() {
            "POST" => self.begin(asked),
            "PATCH" => self.append(asked, last),
            "GET" if is_upload => self.state_of(asked, last, 204),
            "DELETE" => {
                self.uploads.remove(last);
                Answer::new(204, "")
            }
            "PUT" if is_upload => self.finish(asked, last),
            "PUT" => self.put_manifest(asked, last),
            "GET" if path.contains("/referrers/") => self.referrers(last),
            "GET" => match self.manifests.get(last) {
                Some((media_type, bytes)) => Answer::new(200, &bytes[..]).header("content-type", media_type),
                None => Answer::new(404, ""),
            },
            "HEAD" => match self.blobs.get(&last.parse().unwrap()) {
                Some(bytes) => Answer::new(200, &bytes[..]),
                None => Answer::new(404, ""),
            },
            _ => Answer::new(405, ""),
        }
    }

    /// Begins an upload, or mounts a blob of another repository.
    fn begin(&mut self, asked: &Asked) -> Answer {
        let from = query(&asked.path, "mount").and_then(|it| it.parse::<Digest>().ok());
        if let Some((digest, bytes)) = from.and_then(|it| Some((it, self.others.get(&it)?.clone()))) {
            self.blobs.insert(digest, bytes);
            return Answer::new(201, "");
        }
        let id = format!("u{}", self.uploads.len());
        self.uploads.insert(id.clone(), Vec::new());
        let answer = Answer::new(202, "").header("location", &self.location(asked, &id));
        match self.chunk {
            Some(chunk) => answer.header("oci-chunk-min-length", &chunk.to_string()),
            None => answer,
        }
    }

    fn append(&mut self, asked: &Asked, id: &str) -> Answer {
        let fault = self.fault(asked);
        let range = asked.headers["content-range"].clone();
        let first: usize = range.split('-').next().unwrap().parse().unwrap();
        let upload = self.uploads.get_mut(id).unwrap();
        if first != upload.len() {
            return Answer::new(416, "");
        }
        if let Some(status) = fault {
            upload.extend_from_slice(&asked.bytes[..self.kept]);
            return Answer::new(status, "");
        }
        upload.extend_from_slice(&asked.bytes);
        self.state_of(asked, id, 202)
    }

    /// How much of an upload there is.
    fn state_of(&self, asked: &Asked, id: &str, status: u16) -> Answer {
        let range = format!("0-{}", self.uploads[id].len().saturating_sub(1));
        let location = self.location(asked, id);
        Answer::new(status, "")
            .header("range", &range)
            .header("location", &location)
    }

    fn finish(&mut self, asked: &Asked, id: &str) -> Answer {
        if let Some(status) = self.fault(asked) {
            return Answer::new(status, "");
        }
        assert_eq!(
            query(&asked.path, "state").as_deref(),
            Some("a+b"),
            "the query is to be kept"
        );
        let mut bytes = self.uploads.remove(id).unwrap();
        bytes.extend_from_slice(&asked.bytes);
        let digest: Digest = query(&asked.path, "digest").unwrap().parse().unwrap();
        if Digest::of(&bytes) != digest {
            return Answer::new(400, r#"{"errors":[{"code":"DIGEST_INVALID"}]}"#);
        }
        self.blobs.insert(digest, bytes);
        Answer::new(201, "").header("docker-content-digest", &digest.to_string())
    }

    fn put_manifest(&mut self, asked: &Asked, name: &str) -> Answer {
        let digest = Digest::of(&asked.bytes).to_string();
        let kept = (asked.headers["content-type"].clone(), asked.bytes.clone());
        self.manifests.insert(name.to_owned(), kept.clone());
        self.manifests.insert(digest.clone(), kept);
        let answer = Answer::new(201, "").header("docker-content-digest", &digest);
        let document: Value = serde_json::from_slice(&asked.bytes).unwrap();
        match document["subject"]["digest"].as_str() {
            Some(subject) if self.knows_referrers => answer.header("oci-subject", subject),
            _ => answer,
        }
    }

    fn referrers(&self, subject: &str) -> Answer {
        if !self.knows_referrers {
            return Answer::new(404, "404 page not found");
        }
        let mut found = Vec::new();
        for (name, (media_type, bytes)) in &self.manifests {
            let document: Value = serde_json::from_slice(bytes).unwrap();
            if name.starts_with("sha256:") && document["subject"]["digest"] == json!(subject) {
                found.push(
                    json!({"mediaType": media_type, "digest": name, "size": bytes.len(),
                    "artifactType": document["artifactType"]}),
                );
            }
        }
        Answer::new(200, json!({"schemaVersion": 2, "manifests": found}).to_string())
    }
}
