//! A crowd of sandboxes that is killed together with the thawd that made it; the next thawd removes what they left.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use thaw_tiny_guest::bare::bare;
use thaw_tiny_node::daemon::log;
use thaw_tiny_node::{Counts, Place, Thawd};
use tokio::task::JoinSet;

use super::health;
use crate::Report;
use crate::create::{Node, Ready};

/// Creations on their way at a time.
const OVERLAP: usize = 8;
/// How long the next thawd may take to remove what the crowd left.
const PATIENCE: Duration = Duration::from_secs(120);
/// Between two counts.
const LOOK: Duration = Duration::from_millis(200);

/// Makes `count` sandboxes of a tiny guest, kills them and their thawd with SIGKILL, starts another and waits until nothing of
/// them is left. Gives the kernel workers that waited.
///
/// # Errors
/// What is left of them after [`PATIENCE`], or that the host is not well.
pub fn storm(report: &mut Report, count: usize) -> Result<health::Waiting, String> {
    let runtime = tokio::runtime::Runtime::new().map_err(|e| format!("no runtime: {e}"))?;
    let own = std::env::current_exe().map_err(|e| format!("where this program is: {e}"))?;
    let binaries = own.parent().unwrap_or(Path::new("."));
    let place = Place::new(binaries, &bare(0)).ok_or("this host cannot run it")?;
    let node = runtime.block_on(async {
        let node = Node::start(place, Ready::Nothing, 0..=0).await?;
        make(&node, count).await?;
        Ok::<_, String>(node)
    })?;
    let first = node.thawd.record();
    let crowd = Counts::of(&node.place, &[first]);
    if crowd.vmms() != count {
        return Err(format!("{count} sandboxes have {} VMMs", crowd.vmms()));
    }
    let watch = health::Watch::begin();
    let killed = Instant::now();
    let Node { place, thawd, .. } = node;
    thawd.kill();
    for vmm in crowd.processes.iter().filter_map(|p| p.strip_prefix("thaw-vmm ")) {
        let pid = vmm
            .parse()
            .ok()
            .and_then(Pid::from_raw)
            .ok_or("a process without a number")?;
        // It may have ended with the others already.
        let _ = kill_process(pid, Signal::KILL);
    }
    let next = Thawd::start(&place);
    let served = killed.elapsed();
    nothing_left(&place, &[first, next.record()], &crowd)?;
    let gone = killed.elapsed();
    next.stop();
    health::recovered().map_err(|e| e.to_string())?;
    let waited = watch.most().map_err(|e| e.to_string())?;
    let name = |what: &str| format!("{count} killed with their thawd: {what}");
    report.sample(&name("until the next serves"), "ms", served.as_secs_f64() * 1e3);
    report.sample(&name("until nothing is left"), "ms", gone.as_secs_f64() * 1e3);
    waited.sample(report, &format!("{count} killed with their thawd"));
    Ok(waited)
}

async fn make(node: &Node, count: usize) -> Result<(), String> {
    let next = Arc::new(AtomicUsize::new(0));
    let mut workers = JoinSet::new();
    for _ in 0..OVERLAP.min(count) {
        let (client, request, next) = (node.client.clone(), node.request(), next.clone());
        workers.spawn(async move {
            while next.fetch_add(1, Ordering::Relaxed) < count {
                client
                    .create(&request)
                    .await
                    .map_err(|e| format!("{e}; {}", e.context.join("; ")))?;
            }
            Ok::<_, String>(())
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker.map_err(|e| e.to_string())??;
    }
    Ok(())
}

/// Waits until no process, machine, tap, cgroup or interface of the crowd is there.
fn nothing_left(
    place: &Place,
    makers: &[thaw_pools::process::ProcessRecord],
    crowd: &Counts,
) -> Result<(), String> {
    let start = Instant::now();
    loop {
        let now = Counts::of(place, makers);
        let cgroups: Vec<&String> = now.cgroups.intersection(&crowd.cgroups).collect();
        if now.vmms() == 0 && now.machines == 0 && now.taps == 0 && cgroups.is_empty() {
            return Ok(());
        }
        if start.elapsed() > PATIENCE {
            return Err(format!(
                "left after {PATIENCE:?}: {} VMMs, {} machines, {} taps, cgroups {cgroups:?}; thawd's log ends:\n{}",
                now.vmms(),
                now.machines,
                now.taps,
                log(place)
            ));
        }
        std::thread::sleep(LOOK);
    }
}
