//! The node that a new sandbox is made on.
//!
//! Two nodes in random order are asked for their room, and of those that have the template, the one with more room makes the sandbox; the others are
//! asked only if neither can. Two random choices spread sandboxes nearly as well as asking all nodes, and nodes do not all choose the same one.
//! Requests with one idempotency key ask in one order, so a repeated request finds the node that has its answer.
//!
//! Invariants: a request is sent to [`ATTEMPTS`] nodes at most, and to a second only if the first had no room or was not reached.

use std::cmp::Reverse;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::future::join_all;
use serde::Deserialize;
use thaw_protocol::api::IDEMPOTENCY_KEY;
use thaw_protocol::nodes::{ROOM, Room};

use super::super::failure::Failure;
use super::super::members::{Member, Members};
use super::super::service::Service;
use super::forward::{connect, send};
use super::room;
use crate::api::extract::read_body;
use crate::api::peer::Peer;
use crate::api::problem::{ApiCode, Refusal};
use crate::api::scope::Scope;

/// Most nodes that a request is sent to.
const ATTEMPTS: usize = 2;
/// How many nodes are asked for their room first.
const ASKED_FIRST: usize = 2;
/// Largest answer about a node's room, bytes.
const MAX_ROOM: usize = 16 << 10;

/// A node that may make the sandbox.
#[derive(Clone, Debug)]
enum Place {
    Here,
    Other(Arc<Member>),
}

/// The part of a request for a sandbox that decides where it is made.
#[derive(Debug, Deserialize)]
struct Asked {
    #[serde(rename = "templateID")]
    template_id: String,
}

/// A creation.
struct Placing<'a> {
    service: &'a Service,
    members: &'a Members,
    scope: Scope,
    key: HeaderValue,
    template: String,
    /// Whether the node with most room is preferred, not the first in the order.
    by_room: bool,
    head: Parts,
    body: Bytes,
    next: Next,
}

/// Creates a sandbox on the node with most room that has its template, for the caller with this API key.
///
/// # Errors
/// The body does not arrive. No node that has room can be reached.
pub async fn place(
    service: &Service,
    members: &Members,
    (peer, key): (Peer, HeaderValue),
    request: Request,
    next: Next,
) -> Result<Response, Failure> {
    let (head, body) = request.into_parts();
    let body = read_body(Request::from_parts(head.clone(), body)).await?;
    let Ok(asked) = serde_json::from_slice::<Asked>(&body) else {
        // The handler here says what is wrong with it.
        return Ok(next.run(Request::from_parts(head, Body::from(body))).await);
    };
    let repeated = repeated(&head.headers, &key);
    let seed = match repeated {
        Some(seed) => seed,
        None => thaw_sandbox::random().map_err(|e| Refusal::new(ApiCode::Broken, e))?,
    };
    let places = ordered(members, &seed);
    let placing = Placing {
        service,
        members,
        scope: Scope::of(&peer),
        key,
        template: asked.template_id,
        by_room: repeated.is_none(),
        head,
        body,
        next,
    };
    placing.make(&places).await
}

/// The order for a request with an idempotency key.
fn repeated(headers: &HeaderMap, key: &HeaderValue) -> Option<[u8; 32]> {
    let given = headers.get(IDEMPOTENCY_KEY)?;
    let both = [key.as_bytes(), b"\0", given.as_bytes()].concat();
    Some(*blake3::hash(&both).as_bytes())
}

/// All nodes, in the order of a seed. A node that comes or goes does not change the order of the others.
fn ordered(members: &Members, seed: &[u8; 32]) -> Vec<Place> {
    let others = members.others();
    let others = others
        .iter()
        .map(|member| (member.name.as_str(), Place::Other(member.clone())));
    let mut all: Vec<_> = others.chain([(members.name(), Place::Here)]).collect();
    all.sort_by_key(|(name, _)| *blake3::keyed_hash(seed, name.as_bytes()).as_bytes());
    all.into_iter().map(|(_, place)| place).collect()
}

/// Whether another node may have room.
fn is_full(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE | StatusCode::INSUFFICIENT_STORAGE
    )
}

impl Placing<'_> {
    async fn make(&self, places: &[Place]) -> Result<Response, Failure> {
        let mut left = if self.by_room { ATTEMPTS } else { 1 };
        let mut refused = None;
        let (first, rest) = places.split_at(places.len().min(ASKED_FIRST));
        for asked in [first, rest] {
            if left == 0 {
                break;
            }
            for place in self.ranked(asked).await.into_iter().take(left) {
                left -= 1;
                match self.attempt(&place).await {
                    Ok(answer) if is_full(answer.status()) => refused = Some(answer),
                    Ok(answer) => return Ok(answer),
                    Err(NotMade::Unreached(failure)) => refused = Some(failure.into_response()),
                    Err(NotMade::Unknown(failure)) => return Err(failure),
                }
            }
        }
        match refused {
            Some(answer) => Ok(answer),
            // No node has the template, or all drain: this one says which.
            None => Ok(self.next.clone().run(self.request()).await),
        }
    }

    /// Those of these nodes that can make the sandbox, the best first.
    async fn ranked(&self, places: &[Place]) -> Vec<Place> {
        let rooms = join_all(places.iter().map(|place| self.room(place))).await;
        let able = places.iter().zip(rooms).filter_map(|(place, room)| {
            let room = room.filter(|room| room.has_template && !room.is_draining)?;
            Some((place.clone(), room))
        });
        let mut able: Vec<_> = able.collect();
        if self.by_room {
            able.sort_by_key(|(_, room)| Reverse(size(room)));
        }
        able.into_iter().map(|(place, _)| place).collect()
    }

    async fn room(&self, place: &Place) -> Option<Room> {
        let member = match place {
            Place::Here => return Some(room::here(self.service, &self.template, &self.scope).await),
            Place::Other(member) => member,
        };
        let path = room_of(&self.template);
        let answer = self.members.ask(member, &path, Some(&self.key), MAX_ROOM).await;
        let room = answer.and_then(|answer| match answer.status {
            StatusCode::OK => serde_json::from_slice(&answer.body).map_err(|e| e.to_string()),
            status => Err(format!("it answered {status}")),
        });
        let room = room
            .inspect_err(|why| tracing::warn!(node = member.name, "the room of a node is unknown: {why}"));
        room.ok()
    }

    async fn attempt(&self, place: &Place) -> Result<Response, NotMade> {
        match place {
            Place::Here => Ok(self.next.clone().run(self.request()).await),
            Place::Other(member) => {
                let stream = connect(self.service, member, false).await;
                let stream = stream.map_err(NotMade::Unreached)?;
                let sent = send(self.service, member, stream, self.request()).await;
                sent.map_err(|failure| match self.by_room {
                    true => NotMade::Unknown(failure.of_creation()),
                    // A repeated request finds the sandbox.
                    false => NotMade::Unknown(failure),
                })
            }
        }
    }

    fn request(&self) -> Request {
        Request::from_parts(self.head.clone(), Body::from(self.body.clone()))
    }
}

/// The path of a node's room for a template.
fn room_of(template: &str) -> String {
    let mut query = form_urlencoded::Serializer::new(String::new());
    query.append_pair("template", template);
    format!("{ROOM}?{}", query.finish())
}

/// How a creation on another node failed.
enum NotMade {
    /// The node got no request.
    Unreached(Failure),
    /// The node may have made the sandbox.
    Unknown(Failure),
}

/// How much room there is, to be compared: memory first, which no machine can do without.
fn size(room: &Room) -> (u64, u64, Reverse<u64>) {
    let free = |amount: Option<u64>| amount.unwrap_or(u64::MAX);
    (
        free(room.free_memory_mib),
        free(room.free_vcpus),
        Reverse(room.running),
    )
}
