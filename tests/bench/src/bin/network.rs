//! `make bench-network`: packets through a slot, redirected by eBPF and by way of its namespace's nftables, in turn; then TCP of a guest
//! beside TCP over a pair of interfaces.

use std::net::TcpStream;
use std::process::ExitCode;

use thaw_bench::network::Path;
use thaw_bench::network::frames::Guest;
use thaw_bench::network::inside::Inside;
use thaw_bench::network::place::{OUTSIDE, PORT, Place};
use thaw_bench::network::streams::{BYTES, Connection};
use thaw_bench::{Report, by_quick, conclude};
use thaw_network::{FastPathSetting, NetworkSlot, Networks, Setup};
use thaw_pools::resource::Kind;

/// Rounds, each a burst of every kind each way in turn; as many as warm up are not counted.
const WHOLE: usize = 3_000;
const QUICK: usize = 100;
const WARM_UP: usize = 10;
/// So many of these rounds are one round of TCP, at least [`LEAST_OF_TCP`].
const EACH_OF_TCP: usize = 30;
const LEAST_OF_TCP: usize = 3;
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
    report.keep()?;
    measure_tcp(&place, (rounds / EACH_OF_TCP).max(LEAST_OF_TCP), &mut report)?;
    report.note(
        "One thread is guest, VMM and server. The time is that of the kernel's path from the tap to a socket outside and back, \
         through the host's forwarding and masquerading, which is the same in both.",
    );
    if cfg!(debug_assertions) {
        report.note(
            "Built without optimisation, so this program's own share of the time is larger than in a release build.",
        );
    }
    report.keep()?;
    for (_, networks, slot, _) in open {
        networks.destroy(slot);
    }
    Ok(report)
}

/// TCP of a guest, through a slot's tap, beside TCP over the pair of interfaces that this host has to the outside.
fn measure_tcp(place: &Place, rounds: usize, report: &mut Report) -> Result<(), String> {
    let networks = Networks::new(Setup::default());
    let slot = networks.make(&()).map_err(|e| format!("a slot: {e}"))?;
    let inside = Inside::behind(&slot)?;
    let listener = place.listener(TCP_PORT)?;
    let direct = || TcpStream::connect((OUTSIDE, TCP_PORT)).map_err(|e| format!("a connection: {e}"));
    let ways = [
        ("tap", Connection::open(&listener, || inside.connect(TCP_PORT))?),
        ("veth", Connection::open(&listener, direct)?),
    ];
    for round in 0..=rounds {
        for (way, connection) in &ways {
            let (out, back) = (connection.outward()?, connection.inward()?);
            // The first warms up.
            if round == 0 {
                continue;
            }
            let rate = |took: f64| 8.0 * BYTES as f64 / took / 1e9;
            let (out, back) = (out.as_secs_f64(), back.as_secs_f64());
            for (what, rate) in [
                (TCP_OUT, rate(out)),
                (TCP_IN, rate(back)),
                (TCP, rate((out + back) / 2.0)),
            ] {
                report.sample(&format!("{what}, {way}"), "Gbit/s", rate);
            }
        }
    }
    for (ratio, what) in [
        ("net_out_over_veth", TCP_OUT),
        ("net_in_over_veth", TCP_IN),
        ("net_over_veth", TCP),
    ] {
        report.ratio(ratio, &format!("{what}, tap"), &format!("{what}, veth"))?;
    }
    report.note(
        "TCP: a guest's kernel is another network namespace, and a thread carries its frames to the tap and back, as a VMM does. They pass \
         the slot, the host's forwarding and masquerading and the pair of interfaces; the other connection passes only the pair.",
    );
    drop(ways);
    drop(inside);
    networks.destroy(slot);
    Ok(())
}

const TCP_PORT: u16 = 5201;
const TCP_OUT: &str = "TCP out";
const TCP_IN: &str = "TCP in";
const TCP: &str = "TCP out, then in";
const OUT: &str = "little packets out";
const IN: &str = "little packets in";
const FULL_OUT: &str = "full frames out";
const FULL_IN: &str = "full frames in";
const TRIP: &str = "round trip";
