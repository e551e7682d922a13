//! Resource usage of a pod: what the kernel reports about its VMM. The guest is not asked, so it cannot delay
//! this.

use thaw_protocol::shim::cgroup2::{CPUStat, MemoryStat, Metrics, PidsStat};
use thaw_protocol::shim::{Any, MessageField};

use crate::error::{Error, Result, WithContext};
use crate::stats;

/// Metrics of the process `vmm`, encoded for containerd.
pub fn metrics(vmm: i32) -> Result<Any> {
    let read = |name: &str| {
        let path = format!("/proc/{vmm}/{name}");
        std::fs::read_to_string(&path).with_context(|| format!("read {path}"))
    };
    let unknown = || Error::State(format!("cannot parse the statistics of VMM {vmm}"));
    stats::encoded(&parse(&read("stat")?, &read("statm")?).ok_or_else(unknown)?)
}

/// Parses `stat` and `statm` of proc(5).
fn parse(stat: &str, statm: &str) -> Option<Metrics> {
    // The program's name is in parentheses and may contain parentheses.
    let (_, after) = stat.rsplit_once(')')?;
    let fields: Vec<u64> = after.split_whitespace().map(|n| n.parse().unwrap_or(0)).collect();
    // Fields are numbered as in proc(5); the first after the name is 3, the state.
    let field = |number: usize| fields.get(number - 3).copied();
    let usec = |ticks: u64| {
        let a_second = rustix::param::clock_ticks_per_second().max(1);
        ticks.saturating_mul(1_000_000) / a_second
    };
    let (user, system) = (usec(field(14)?), usec(field(15)?));
    let page = rustix::param::page_size() as u64;
    let pages: Vec<u64> = statm.split_whitespace().map_while(|n| n.parse().ok()).collect();
    let (resident, shared) = (pages.get(1)? * page, pages.get(2)? * page);
    Some(Metrics {
        cpu: MessageField::some(CPUStat {
            usage_usec: user + system,
            user_usec: user,
            system_usec: system,
            ..Default::default()
        }),
        memory: MessageField::some(MemoryStat {
            usage: resident,
            usage_limit: u64::MAX,
            anon: resident.saturating_sub(shared),
            file: shared,
            ..Default::default()
        }),
        pids: MessageField::some(PidsStat {
            current: field(20)?,
            ..Default::default()
        }),
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_protocol::shim::Message;

    #[test]
    fn process_state_is_read_with_any_name() {
        let stat = "7 (a) b (c) S 1 1 1 0 -1 4194560 1 2 3 4 200 100 0 0 20 0 9 0 5 6 7";
        let told = parse(stat, "1000 30 10 1 0 5 0").unwrap();
        let tick = 1_000_000 / rustix::param::clock_ticks_per_second();
        assert_eq!(
            (told.cpu.user_usec, told.cpu.system_usec),
            (200 * tick, 100 * tick)
        );
        assert_eq!(told.pids.current, 9);
        let page = rustix::param::page_size() as u64;
        assert_eq!((told.memory.usage, told.memory.anon), (30 * page, 20 * page));
        assert!(parse("7 nothing", "").is_none());
        let own = metrics(std::process::id() as i32).unwrap();
        assert!(Metrics::parse_from_bytes(&own.value).unwrap().memory.usage > 0);
        assert!(metrics(i32::MAX).is_err());
    }
}
