//! `make bench-network`: packets through a slot, redirected by eBPF and by way of its namespace's nftables, in turn.

use std::path::Path as Directory;
use std::process::ExitCode;

use thaw_bench::network::Path;
use thaw_bench::network::frames::Guest;
use thaw_bench::network::place::{PORT, Place};
use thaw_bench::{Report, by_quick, conclude};
use thaw_network::{FastPathSetting, NetworkSlot, Networks, Setup};
use thaw_pools::resource::Kind;

/// Rounds, each a burst of every kind each way in turn; as many as warm up are not counted.
const WHOLE: usize = 3_000;
const QUICK: usize = 100;
const WARM_UP: usize = 10;
/// Round trips in each.
const TRIPS: usize = 5;
/// Bytes of payload: of little packets, and of those that fill a frame.
const LITTLE: usize = 18;
const FULL: usize = 1472;
const WAYS: [(&str, FastPathSetting); 2] = [
    ("eBPF", FastPathSetting::Auto),
    ("nftables", FastPathSetting::Off),
];

fn main() -> ExitCode {
    let rounds = by_quick(QUICK, WHOLE);
    conclude("network", measure(rounds))
}

fn measure(rounds: usize) -> Result<Report, String> {
    let mut report = Report::new("network");
    let place = Place::enter()?;
    let mut open: Vec<(&str, Networks, NetworkSlot, Path)> = Vec::new();
    for (n, (way, fast_path)) in WAYS.into_iter().enumerate() {
        let networks = Networks::new(Setup {
            fast_path,
            ..Setup::default()
        });
        let slot = networks.make(&()).map_err(|e| format!("a slot: {e}"))?;
        let fast = slot.uplink.as_ref().is_some_and(|uplink| uplink.is_fast());
        if fast != (fast_path == FastPathSetting::Auto) {
            return Err("this host has no fast path; thaw doctor says why".into());
        }
        let guest = Guest::of(&slot, 40_000 + n as u16).map_err(|e| format!("the tap: {e}"))?;
        let path = Path::open(guest, place.server(PORT + n as u16)?, PORT + n as u16)?;
        open.push((way, networks, slot, path));
    }
    for round in 0..WARM_UP + rounds {
        for (way, _, _, path) in &mut open {
            let mut sample = |what: &str, unit: &str, value: f64| {
                if round >= WARM_UP {
                    report.sample(&format!("{what}, {way}"), unit, value);
                }
            };
            sample(OUT, "kpps", path.outward(LITTLE)? / 1e3);
            sample(IN, "kpps", path.inward(LITTLE)? / 1e3);
            let bits = |packets: f64| packets * 8.0 * FULL as f64 / 1e9;
            sample(FULL_OUT, "Gbit/s", bits(path.outward(FULL)?));
            sample(FULL_IN, "Gbit/s", bits(path.inward(FULL)?));
            for trip in path.round_trips(TRIPS)? {
                sample(TRIP, "µs", trip.as_secs_f64() * 1e6);
            }
        }
    }
    for (ratio, what) in [
        ("fast_over_nftables_pps", OUT),
        ("fast_over_nftables_pps_inward", IN),
        ("fast_over_nftables_throughput", FULL_OUT),
        ("fast_over_nftables_throughput_inward", FULL_IN),
        ("fast_over_nftables_round_trip", TRIP),
    ] {
        report.ratio(ratio, &format!("{what}, eBPF"), &format!("{what}, nftables"))?;
    }
    let p99 = (format!("{TRIP}, eBPF"), format!("{TRIP}, nftables"));
    report.ratio_of(
        "fast_over_nftables_round_trip_p99",
        (&p99.0, 99.0),
        (&p99.1, 99.0),
    )?;
    report.note(
        "One thread is guest, VMM and server. The time is that of the kernel's path from the tap to a socket outside and back, \
         through the host's forwarding and masquerading, which is the same in both.",
    );
    if cfg!(debug_assertions) {
        report.note(
            "Built without optimisation, so this program's own share of the time is larger than in a release build.",
        );
    }
    report
        .write(Directory::new("target/bench"))
        .map_err(|e| format!("target/bench: {e}"))?;
    for (_, networks, slot, _) in open {
        networks.destroy(slot);
    }
    Ok(report)
}

const OUT: &str = "little packets out";
const IN: &str = "little packets in";
const FULL_OUT: &str = "full frames out";
const FULL_IN: &str = "full frames in";
const TRIP: &str = "round trip";
