//! The nodes that answer as one with this node: `[e2b.cluster]`. docs/scale.md describes them.
//!
//! | module | noun |
//! |---|---|
//! | here | who is a member now |
//! | [`proof`] | the secret that all nodes share |
//! | [`endpoint`] | a node's address, and connections to it |
//! | [`asking`] | short requests |
//! | [`searches`] | the node that has a sandbox, if it is not the one in its id |
//! | [`slices`] | the members that Kubernetes names |
//!
//! Nodes have no state in common: an id names its node, and the list of members is the operator's or Kubernetes'. Invariants: there are at
//! most [`MOST`] nodes, each with a tag of its own; this node is never among the others.

use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::HeaderValue;
use axum::http::header::{ACCEPT, HOST};
use axum::response::Response;
use thaw_images::reference::ImageRef;
use thaw_protocol::nodes::MARK;
use thaw_sandbox::CopyPlace;
use thaw_sandbox::config::e2b::ClusterConfig;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sys::lock::Share;
use tokio::sync::watch;

use super::api_key::API_KEY;
use super::idle_connections::Destination;
use super::proxy::{Failed, Outgoing, Proxy, Sent};
use super::token::AccessTokens;
use super::whole_id::{Tag, WholeId};
use crate::api::period::Period;

pub mod asking;
pub mod endpoint;
pub mod proof;
mod searches;
mod slices;

use asking::Answer;
use endpoint::{Endpoint, Stream, Trust};
use proof::{Proof, Step};
use searches::Searches;
use slices::Slices;

/// Most nodes.
pub const MOST: usize = 64;
/// How often the members are read from Kubernetes.
const PERIOD: Duration = Duration::from_secs(5);
/// Longest name of a node.
const MAX_NAME: usize = 253;

/// Another node.
#[derive(Debug)]
pub struct Member {
    pub name: String,
    pub tag: Tag,
    endpoint: Endpoint,
    /// For as long as it is a member with this address.
    membership: Period,
}

impl Member {
    fn new(name: String, endpoint: Endpoint) -> Member {
        Member {
            tag: Tag::of(&name),
            name,
            endpoint,
            membership: Period::default(),
        }
    }

    fn is(&self, other: &Member) -> bool {
        self.name == other.name && self.endpoint == other.endpoint
    }

    fn destination(&self) -> Destination {
        Destination {
            during: self.membership.refer(),
            port: None,
            tenant: None,
        }
    }
}

/// The node that made a sandbox.
#[derive(Clone, Debug)]
pub enum Owner {
    /// This one, or the id does not say.
    Here,
    Other(Arc<Member>),
    /// One that is no member now.
    Gone,
}

/// See the module.
#[derive(Debug)]
pub struct Members {
    name: String,
    tag: Tag,
    proof: Proof,
    trust: Option<Trust>,
    slices: Option<Slices>,
    others: RwLock<Arc<[Arc<Member>]>>,
    proxy: Proxy,
    /// The repository of copies of paused sandboxes.
    copies: Option<String>,
    searches: Searches,
}

impl Members {
    /// Reads the configuration and the files that it names. Returns also what derives the access tokens of sandboxes on all nodes. Blocks.
    ///
    /// # Errors
    /// `config-invalid`: a file cannot be used, this node or its name is not among the nodes, or an address is no node's.
    pub fn open(config: &ClusterConfig) -> Result<(Members, AccessTokens), Error> {
        let (proof, tokens) = proof::read(&config.key)?;
        let name = match &config.node {
            Some(name) => name.clone(),
            None => rustix::system::uname().nodename().to_string_lossy().into_owned(),
        };
        let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-._".contains(&b);
        if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(is_plain) {
            return Err(invalid(&format!(
                "node is {name:?}; a name has 1 to {MAX_NAME} of A-Z a-z 0-9 - . _"
            )));
        }
        let trust = config.ca.as_deref().map(Trust::read).transpose();
        let trust = trust.map_err(|why| invalid(&why))?;
        let slices = match (&config.endpoint_slices, &trust) {
            (None, _) => None,
            (Some(_), _) if !config.nodes.is_empty() => {
                return Err(invalid(
                    "it has both nodes and endpoint_slices: remove one of them",
                ));
            }
            (Some(_), None) => {
                return Err(invalid(
                    "endpoint_slices needs ca: the authorities that sign the nodes' certificates",
                ));
            }
            (Some(slices), Some(trust)) => Some(Slices::of_pod(slices, trust).map_err(|why| invalid(&why))?),
        };
        let others = match slices.is_some() {
            true => Vec::new(),
            false => listed(&config.nodes, &name, trust.as_ref()).map_err(|why| invalid(&why))?,
        };
        if let Some(repository) = &config.paused_registry {
            check_repository(repository).map_err(|why| invalid(&why))?;
        }
        let members = Members {
            tag: Tag::of(&name),
            name,
            proof,
            trust,
            slices,
            others: RwLock::new(shared(others)),
            proxy: Proxy::to_nodes(),
            copies: config.paused_registry.clone(),
            searches: Searches::default(),
        };
        Ok((members, tokens))
    }

    /// Takes the nodes of a configuration that was read again. Its other keys need a restart.
    ///
    /// # Errors
    /// Those of [`Members::open`]; nothing has changed then.
    pub fn reload(&self, config: &ClusterConfig) -> Result<(), Error> {
        if self.slices.is_none() {
            let others = listed(&config.nodes, &self.name, self.trust.as_ref());
            self.replace(others.map_err(|why| invalid(&why))?);
        }
        Ok(())
    }

    /// Reads the members from Kubernetes, if they come from there, until `closing` becomes true. While Kubernetes does not answer, the
    /// members stay.
    pub async fn keep_current(self: Arc<Self>, mut closing: watch::Receiver<bool>) {
        let Some(slices) = &self.slices else { return };
        let mut failed = String::new();
        loop {
            match slices.list().await {
                Ok(endpoints) => {
                    failed.clear();
                    self.replace(distinct(endpoints, &self.name));
                }
                Err(why) if why != failed => {
                    tracing::warn!("the list of nodes stays the same, as Kubernetes does not answer: {why}");
                    failed = why;
                }
                Err(_) => {}
            }
            let ended = closing.wait_for(|closing| *closing);
            if tokio::time::timeout(PERIOD, ended).await.is_ok() {
                return;
            }
        }
    }

    fn replace(&self, others: Vec<Member>) {
        let before = self.others();
        let others = others.into_iter().map(|new| {
            // Idle connections to a node that stays a member are kept.
            let same = before.iter().find(|old| old.is(&new)).cloned();
            same.unwrap_or_else(|| Arc::new(new))
        });
        let others: Arc<[Arc<Member>]> = others.collect();
        let after = names(&others);
        let before = names(&std::mem::replace(&mut *self.others.writing(), others));
        if before != after {
            tracing::info!("the other nodes are now: {after}; before: {before}");
        }
    }

    /// This node's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// This node's tag.
    pub fn tag(&self) -> Tag {
        self.tag
    }

    /// The other nodes, ordered by name.
    pub fn others(&self) -> Arc<[Arc<Member>]> {
        self.others.reading().clone()
    }

    /// The node with a tag.
    pub fn owner(&self, home: Option<Tag>) -> Owner {
        match home {
            None => Owner::Here,
            Some(home) if home == self.tag => Owner::Here,
            Some(home) => {
                let others = self.others();
                let found = others.iter().find(|member| member.tag == home);
                found.map_or(Owner::Gone, |member| Owner::Other(member.clone()))
            }
        }
    }

    /// The step of a request that a node sent, which the value of [`MARK`] proves.
    pub fn step(&self, given: &HeaderValue) -> Option<Step> {
        self.proof.step(given)
    }

    /// Opens a connection to another node.
    ///
    /// # Errors
    /// The node does not answer.
    pub async fn connect(&self, member: &Member, is_http2: bool) -> Result<Box<dyn Stream>, String> {
        member.endpoint.connect_for(is_http2).await
    }

    /// Prepares a caller's request for this step to another node. An upgraded connection ends when `closing` becomes true.
    ///
    /// # Errors
    /// There are too many connections.
    pub fn outgoing(
        &self,
        member: &Member,
        step: Step,
        mut request: Request,
        closing: watch::Receiver<bool>,
    ) -> Result<Outgoing, Failed> {
        request.headers_mut().insert(MARK, self.proof.mark(step).clone());
        self.proxy.outgoing(member.name.as_str().into(), request, closing)
    }

    /// Passes a request on over an idle connection to another node, if there is one.
    ///
    /// # Errors
    /// The connection broke, and the node may have got the request.
    pub async fn reuse(&self, member: &Member, outgoing: Outgoing) -> Result<Sent, Failed> {
        let to = member.destination();
        self.proxy.reuse(&to, outgoing).await
    }

    /// Passes a request on over a new connection to another node, and returns the answer of that node.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn pass_on(
        &self,
        member: &Member,
        stream: Box<dyn Stream>,
        outgoing: Outgoing,
    ) -> Result<Response, Failed> {
        self.proxy.send_over(member.destination(), stream, outgoing).await
    }

    /// Whether paused sandboxes are copied.
    pub fn has_copies(&self) -> bool {
        self.copies.is_some()
    }

    /// Where the copy of a paused sandbox is, if there are copies.
    pub fn copy_place(&self, whole: &WholeId) -> Option<CopyPlace> {
        Some(CopyPlace {
            repository: self.copies.clone()?,
            tag: whole.to_string(),
            key: self.proof.seal(),
        })
    }

    /// Whether a node may have sandboxes whose id names this one: its own, and those that it may have taken over.
    pub fn may_have(&self, node: Tag, home: Tag) -> bool {
        node == home || self.has_copies() || matches!(self.owner(Some(home)), Owner::Gone)
    }

    /// Asks another node something, in the name of the caller with this API key if there is one. The answer has at most `most` bytes.
    ///
    /// # Errors
    /// The node does not answer in time, or with more.
    pub async fn ask(
        &self,
        member: &Member,
        path: &str,
        key: Option<&HeaderValue>,
        most: usize,
    ) -> Result<Answer, String> {
        let request = Request::get(path)
            .header(HOST, member.endpoint.authority())
            .header(ACCEPT, "application/json")
            .header(MARK, self.proof.mark(Step::First))
            .body(Body::empty());
        let mut request = request.map_err(|e| e.to_string())?;
        if let Some(key) = key {
            request.headers_mut().insert(API_KEY, key.clone());
        }
        asking::ask(&member.endpoint, request, most).await
    }
}

fn shared(members: Vec<Member>) -> Arc<[Arc<Member>]> {
    members.into_iter().map(Arc::new).collect()
}

fn names(members: &[Arc<Member>]) -> String {
    let names: Vec<&str> = members.iter().map(|member| member.name.as_str()).collect();
    names.join(", ")
}

fn invalid(why: &str) -> Error {
    Error::new(ErrorKind::ConfigInvalid, format!("[e2b.cluster]: {why}"))
}

/// Checks that a text is a repository of a registry, without a tag.
fn check_repository(text: &str) -> Result<(), String> {
    let name = text.rsplit('/').next().unwrap_or_default();
    let is_plain = text.contains('/') && !name.contains([':', '@']) && !text.starts_with("oci:");
    let is_registry = matches!(
        format!("{text}:tag").parse::<ImageRef>(),
        Ok(ImageRef::Registry(_))
    );
    match is_plain && is_registry {
        true => Ok(()),
        false => Err(format!(
            "paused_registry is {text:?}; it must be a registry and a repository without a tag, such as registry.example/paused"
        )),
    }
}

/// The other nodes of a configured list.
fn listed(nodes: &BTreeMap<String, String>, own: &str, trust: Option<&Trust>) -> Result<Vec<Member>, String> {
    if !nodes.contains_key(own) {
        return Err(format!(
            "nodes has no {own:?}, which is the name of this node: add it, or set node"
        ));
    }
    if nodes.len() > MOST {
        return Err(format!("there are {} nodes; at most {MOST} can be", nodes.len()));
    }
    let mut tags: BTreeMap<Tag, &str> = BTreeMap::new();
    let mut others = Vec::new();
    for (name, url) in nodes {
        if let Some(other) = tags.insert(Tag::of(name), name) {
            return Err(format!(
                "the nodes {other:?} and {name:?} have the same hash, which ids contain: rename one"
            ));
        }
        let endpoint = Endpoint::parse(url, trust)?;
        if name != own {
            others.push(Member::new(name.clone(), endpoint));
        }
    }
    Ok(others)
}

/// The other nodes that Kubernetes names. One with the tag of another, and those beyond [`MOST`], are left out.
fn distinct(endpoints: BTreeMap<String, Endpoint>, own: &str) -> Vec<Member> {
    let mut tags = BTreeMap::from([(Tag::of(own), own.to_owned())]);
    let mut others = Vec::new();
    for (name, endpoint) in endpoints {
        let tag = Tag::of(&name);
        match tags.get(&tag) {
            Some(other) if *other == name => continue,
            Some(other) => {
                tracing::warn!("node {name} is left out: its ids would be like those of node {other}");
                continue;
            }
            None if tags.len() >= MOST => {
                tracing::warn!("node {name} is left out: there are more than {MOST} nodes");
                continue;
            }
            None => {}
        }
        tags.insert(tag, name.clone());
        others.push(Member::new(name, endpoint));
    }
    others
}

#[cfg(test)]
#[path = "members_test.rs"]
mod tests;
