//! What `make bench-create` measures: sandboxes made through thawd's API, of a tiny guest, so that what is timed is thawd's
//! way and not a guest's, and of Linux; and the API's own work.
//!
//! | module | what is measured |
//! |---|---|
//! | [`storm`] | so many creations at once, from one start |
//! | [`parked_byte`] | what they are compared with: a thaw of a parked machine, without thawd |
//! | [`cycle_cpu`] | what a creation and a deletion take of the processors, beside a bare program's |
//! | [`cycles`] | what thousands of creations and deletions leave |
//! | [`growth`] | the same beside few sandboxes and beside many |
//! | [`reads`] | lists by label, and many that watch |

pub mod cycle_cpu;
pub mod cycles;
pub mod growth;
pub mod parked_byte;
pub mod reads;
pub mod storm;

use std::ops::RangeInclusive;
use std::path::PathBuf;

use thaw_daemon::api::client::Client;
use thaw_protocol::api::CreateSandbox;
use thaw_tiny_node::{Place, Thawd};

/// What a thawd has ready for creations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    Nothing,
    /// All parts of a sandbox, and shells: machines in which nothing is yet.
    Parts,
    /// The same, and machines with the template in them.
    Parked,
}

/// A thawd with warm pools, and its client.
pub struct Node {
    pub place: Place,
    pub thawd: Thawd,
    pub client: Client,
    pub ready: Ready,
    /// How many machines wait at least when its pools do nothing.
    waiting: usize,
}

impl Node {
    /// Starts one whose pools hold so many of each that it has ready, from their low mark to their high one, and fills them.
    pub async fn start(place: Place, ready: Ready, marks: RangeInclusive<usize>) -> Result<Node, String> {
        let none = 0..=0;
        let (each, parked) = match ready {
            Ready::Nothing => (none.clone(), none),
            Ready::Parts => (marks, none),
            Ready::Parked => (marks.clone(), marks),
        };
        let waiting = each.start() + parked.start();
        place.fill_pools_to(each, parked);
        let node = Node {
            ready,
            waiting,
            ..Node::configured(place)?
        };
        // The first builds the template; the second makes its shape one that is in demand, the third the template.
        for _ in 0..3 {
            let made = node.client.create(&node.request()).await;
            let made = made.map_err(|e| format!("{e}; {}", e.context.join("; ")))?;
            let deleted = node.client.delete(&made.sandbox.id).await;
            deleted.map_err(|e| e.to_string())?;
        }
        node.settle().await?;
        Ok(node)
    }

    /// Starts one with the pools of its configuration.
    pub fn configured(place: Place) -> Result<Node, String> {
        let thawd = Thawd::start(&place);
        let client = Client::connect(&place.socket()).ok_or("thawd does not answer")?;
        Ok(Node {
            place,
            thawd,
            client,
            ready: Ready::Nothing,
            waiting: 0,
        })
    }

    /// Ends it; its place is there for another.
    pub fn stop(self) -> Place {
        self.thawd.stop();
        self.place
    }

    /// So many more machines wait from now on when its pools do nothing.
    pub fn wait_for_more(&mut self, machines: usize) {
        self.waiting += machines;
    }

    /// What is made.
    pub fn request(&self) -> CreateSandbox {
        serde_json::from_value(self.place.request()).expect("it is a creation")
    }

    /// Waits until it does nothing: at least as many machines wait as are to, and they and its descriptors have stayed as many
    /// for a while.
    pub async fn settle(&self) -> Result<(), String> {
        let descriptors = || -> Result<usize, String> {
            let directory = PathBuf::from(format!("/proc/{}/fd", self.thawd.record().pid));
            let ended = |e| format!("thawd has ended: {e}");
            // Their number is its size since Linux 6.2. Reading 20,000 entries would take the caches from what is timed next.
            match std::fs::metadata(&directory).map_err(ended)?.len() {
                0 => Ok(std::fs::read_dir(&directory).map_err(ended)?.count()),
                count => Ok(count as usize),
            }
        };
        let (mut last, mut same) = ((0, 0), 0);
        for _ in 0..SETTLE_LIMIT {
            tokio::time::sleep(SETTLE_STEP).await;
            let now = (descriptors()?, self.place.spares());
            same = match now == last && now.1 >= self.waiting {
                true => same + 1,
                false => 0,
            };
            last = now;
            if same == SETTLED {
                return Ok(());
            }
        }
        Err(format!(
            "its pools are not full: {} of {} machines wait",
            self.place.spares(),
            self.waiting
        ))
    }
}

/// How often it is looked whether the pools are full.
const SETTLE_STEP: std::time::Duration = std::time::Duration::from_millis(20);
/// So many looks alike, and it is: longer than a machine takes to be made.
const SETTLED: usize = 25;
/// Most looks: ten minutes of them, for an emulated host that makes hundreds of machines.
const SETTLE_LIMIT: usize = 30_000;
