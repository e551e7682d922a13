//! The metrics of a node: its pools, its image store, its fetches.

use std::sync::atomic::{AtomicU64, Ordering};

use thaw_images::fill::FillStats;
use thaw_images::registry::EndpointCounts;
use thaw_pools::statistics::PoolStatistics;
use thaw_sandbox::admission::Admission;
use thaw_sandbox::images::Size;
use thaw_sandbox::miss_counts::{MissCounts, Refusal};
use thaw_sandbox::{BudgetStatistics, Node, Tenants};

use super::{Families, Names, OTHER};

/// Adds counters that were updated as events happened. The stores of tenants are counted with the node's.
pub fn collect(tenants: &Tenants, endpoints: &Names, families: &mut Families) {
    let (node, all) = (tenants.shared(), tenants.all());
    pools(&tenants.pool_statistics(), families);
    let filled: Vec<_> = all.iter().map(|node| node.images.filler().stats()).collect();
    fills(&filled, families);
    let missed: Vec<_> = all.iter().map(|node| node.images.miss_counts()).collect();
    misses(&missed, families);
    fetches(few(node.images.client.stats().snapshot(), endpoints), families);
    budget(node.budget.statistics(), families);
    admission(&node.admission, families);
    held_snapshots(&all, families);
    let sizes = all.iter().filter_map(|node| node.images.size());
    if let Some(size) = sizes.reduce(Size::and) {
        families.gauge(
            "thaw_store_bytes",
            "Disk the image store takes, as it was measured last: at most a minute ago. Tenants' own stores count too.",
            size.stored as f64,
        );
        families.gauge(
            "thaw_store_logical_bytes",
            "File data of the store's layers, were all of it there.",
            size.logical as f64,
        );
        families.gauge("thaw_store_images", "Images in the store.", size.images as f64);
    }
}

fn held_snapshots(nodes: &[Node], families: &mut Families) {
    let held = nodes.iter().map(|node| node.snapshots.kept());
    let (count, bytes) = held.fold((0, 0), |sum, held| (sum.0 + held.0, sum.1 + held.1));
    families.gauge(
        "thaw_snapshots_held",
        "Users' snapshots that thawd holds: their next thaw does not read and compare them.",
        count as f64,
    );
    families.gauge(
        "thaw_snapshots_held_bytes",
        "Memory of thawd that they take.",
        bytes as f64,
    );
}

fn budget(budget: BudgetStatistics, families: &mut Families) {
    families.gauge(
        "thaw_disk_budget_bytes",
        "What sandboxes and their snapshots may take of the disk; 0 without a limit.",
        budget.limit.unwrap_or(0) as f64,
    );
    families.gauges(
        "thaw_disk_budget_used_bytes",
        "What they count with: disks with their size, snapshots with what they take.",
        [
            ([("of", "sandboxes")], budget.sandboxes as f64),
            ([("of", "snapshots")], budget.snapshots as f64),
        ],
    );
    families.counters(
        "thaw_disk_budget_refused_total",
        "Creations and freezes refused for want of disk budget.",
        [
            ([("of", "sandboxes")], budget.refused_sandboxes),
            ([("of", "snapshots")], budget.refused_snapshots),
        ],
    );
}

fn admission(admission: &Admission, families: &mut Families) {
    let node = admission.node();
    families.gauges(
        "thaw_capacity_limit",
        "What the machines of the node may have together; 0 without a limit.",
        [
            ([("of", "vcpus")], node.vcpus.unwrap_or(0) as f64),
            ([("of", "memory_mib")], node.memory_mib.unwrap_or(0) as f64),
        ],
    );
    families.gauges(
        "thaw_capacity_used",
        "What they have.",
        [
            ([("of", "vcpus")], node.used_vcpus as f64),
            ([("of", "memory_mib")], node.used_memory_mib as f64),
        ],
    );
    let refused = [("tenant", false), ("node", true)].map(|(whose, of_node)| {
        let counts = admission.refused(of_node);
        counts.map(|(quantity, count)| ([("whose", whose), ("limit", quantity.name())], count))
    });
    families.counters(
        "thaw_admission_refused_total",
        "Creations, pauses and freezes refused by a limit of their tenant or of the node, by its name.",
        refused.into_iter().flatten(),
    );
}

fn pools(pools: &[PoolStatistics], families: &mut Families) {
    type Now = fn(&PoolStatistics) -> usize;
    let now: [(&str, &str, Now); 5] = [
        ("thaw_pool_ready", "Ready to be claimed.", |p| p.ready),
        ("thaw_pool_making", "Being made ahead.", |p| p.making),
        ("thaw_pool_doomed", "Waiting for their destruction.", |p| p.doomed),
        ("thaw_pool_low", "It refills when fewer are ready.", |p| p.low),
        ("thaw_pool_high", "It refills until so many are ready.", |p| {
            p.high
        }),
    ];
    for (name, help, value) in now {
        families.gauges(
            name,
            help,
            pools.iter().map(|p| ([("pool", p.kind)], value(p) as f64)),
        );
    }
    type Ever = fn(&PoolStatistics) -> u64;
    let ever: [(&str, &str, Ever); 6] = [
        ("thaw_pool_claims_total", "Claims, hits and misses.", |p| p.claims),
        ("thaw_pool_hits_total", "Claims that found one ready.", |p| p.hits),
        ("thaw_pool_made_total", "Made, ahead or for a claimer.", |p| {
            p.made
        }),
        (
            "thaw_pool_failed_total",
            "Not made, ahead or for a claimer.",
            |p| p.failed,
        ),
        (
            "thaw_pool_quarantined_total",
            "Ready, but unfit when they were to be handed out.",
            |p| p.quarantined,
        ),
        ("thaw_pool_destroyed_total", "Ended.", |p| p.destroyed),
    ];
    for (name, help, value) in ever {
        families.counters(name, help, pools.iter().map(|p| ([("pool", p.kind)], value(p))));
    }
    let misses = pools.iter().flat_map(|p| {
        p.misses
            .iter()
            .map(|(reason, count)| ([("pool", p.kind), ("reason", reason.slug())], *count))
    });
    families.counters(
        "thaw_pool_misses_total",
        "Claims that found nothing ready, by why.",
        misses,
    );
    families.times(
        "thaw_pool_claim_seconds",
        "Claims that found one ready.",
        pools.iter().map(|p| ([("pool", p.kind)], p.claim_times.clone())),
    );
    families.times(
        "thaw_pool_make_seconds",
        "Making one.",
        pools.iter().map(|p| ([("pool", p.kind)], p.make_times.clone())),
    );
}

fn fills(stores: &[&FillStats], families: &mut Families) {
    type Of = fn(&FillStats) -> &AtomicU64;
    let counters: [(&str, &str, Of); 12] = [
        (
            "thaw_fill_asked_total",
            "Ranges of file data asked for: reads of guests that were not in their cache files, and prefetches.",
            |s| &s.asked,
        ),
        (
            "thaw_fill_ready_total",
            "Of these, there already when asked for.",
            |s| &s.ready,
        ),
        ("thaw_fill_reads_total", "Ranges of stored blobs read.", |s| {
            &s.reads
        }),
        ("thaw_fill_stored_bytes_total", "Bytes of these.", |s| {
            &s.stored_bytes
        }),
        ("thaw_fill_spans_total", "Spans expanded.", |s| &s.spans),
        ("thaw_fill_chunks_total", "Chunks made ready.", |s| &s.chunks),
        (
            "thaw_fill_joined_total",
            "Fills that waited for another's read.",
            |s| &s.joined,
        ),
        (
            "thaw_fill_overtaken_total",
            "Prefetches broken off because a guest wanted what they read.",
            |s| &s.overtaken,
        ),
        (
            "thaw_fill_kept_total",
            "Spans found among those expanded shortly before.",
            |s| &s.kept,
        ),
        (
            "thaw_fill_mismatches_total",
            "Chunks or spans refused for a wrong digest.",
            |s| &s.mismatches,
        ),
        ("thaw_fill_cut_total", "Cache files found cut short.", |s| &s.cut),
        (
            "thaw_fill_repairs_total",
            "Layers unpacked again, for want of an index.",
            |s| &s.repairs,
        ),
    ];
    for (name, help, of) in counters {
        let count = |stats: &&FillStats| of(stats).load(Ordering::Relaxed);
        families.counter(name, help, stores.iter().map(count).sum());
    }
}

fn misses(stores: &[&MissCounts], families: &mut Families) {
    let sum = |of: &dyn Fn(&MissCounts) -> u64| stores.iter().map(|counts| of(counts)).sum();
    families.counters(
        "thaw_misses_refused_total",
        "Misses of VMMs that were not filled, by why: for bytes of images they were not given, or malformed.",
        Refusal::ALL.map(|why| ([("reason", why.slug())], sum(&|counts| counts.refused(why)))),
    );
    families.counter(
        "thaw_misses_held_back_total",
        "How often a VMM asked faster than it may, and was made to wait.",
        sum(&MissCounts::held_back),
    );
}

pub(crate) fn fetches(endpoints: Vec<EndpointCounts>, families: &mut Families) {
    type Of = fn(&EndpointCounts) -> u64;
    let counters: [(&str, &str, Of); 8] = [
        (
            "thaw_fetch_requests_total",
            "Requests for ranges of blobs, redirected ones included.",
            |e| e.requests,
        ),
        (
            "thaw_fetch_retries_total",
            "Requests that failed and were followed by another, here or elsewhere.",
            |e| e.retries,
        ),
        (
            "thaw_fetch_wrong_total",
            "Answers whose bytes were not the blob's.",
            |e| e.wrong_bytes,
        ),
        (
            "thaw_fetch_breaker_opens_total",
            "Times the endpoint was given up for a while.",
            |e| e.breaker_opens,
        ),
        (
            "thaw_fetch_breaker_probes_total",
            "Requests that tried whether it is back.",
            |e| e.breaker_probes,
        ),
        ("thaw_fetch_redirects_total", "Redirects followed.", |e| {
            e.redirects
        }),
        (
            "thaw_fetch_logins_total",
            "Tokens asked for, or passwords read again.",
            |e| e.logins,
        ),
        (
            "thaw_fetch_too_slow_total",
            "Answers given up because they came too slowly.",
            |e| e.too_slow,
        ),
    ];
    for (name, help, of) in counters {
        families.counters(
            name,
            help,
            endpoints
                .iter()
                .map(|e| ([("endpoint", e.endpoint.as_str())], of(e))),
        );
    }
    let bytes = endpoints.iter().flat_map(|e| {
        [("demand", e.demand_bytes), ("prefetch", e.prefetch_bytes)]
            .map(|(why, bytes)| ([("endpoint", e.endpoint.as_str()), ("for", why)], bytes))
    });
    families.counters("thaw_fetch_bytes_total", "Bytes of bodies received.", bytes);
}

/// Metrics of the endpoints with a name, and of all others together: callers can name any registry.
fn few(endpoints: Vec<EndpointCounts>, names: &Names) -> Vec<EndpointCounts> {
    let mut few: Vec<EndpointCounts> = Vec::new();
    let mut others: Option<EndpointCounts> = None;
    for counts in endpoints {
        if names.of(&counts.endpoint) == counts.endpoint {
            few.push(counts);
            continue;
        }
        let sum = others.get_or_insert_with(|| EndpointCounts {
            endpoint: OTHER.into(),
            ..EndpointCounts::default()
        });
        sum.requests += counts.requests;
        sum.demand_bytes += counts.demand_bytes;
        sum.prefetch_bytes += counts.prefetch_bytes;
        sum.retries += counts.retries;
        sum.wrong_bytes += counts.wrong_bytes;
        sum.breaker_opens += counts.breaker_opens;
        sum.breaker_probes += counts.breaker_probes;
        sum.redirects += counts.redirects;
        sum.logins += counts.logins;
        sum.too_slow += counts.too_slow;
    }
    few.extend(others);
    few
}

#[cfg(test)]
mod tests {
    use super::super::MOST_NAMES;
    use super::*;

    #[test]
    fn a_thousand_registries_are_few_endpoints_and_nothing_is_lost() {
        let names = Names::default();
        let counts = |n: u64| EndpointCounts {
            endpoint: format!("registry-{n:04}.example"),
            requests: n,
            logins: 1,
            ..EndpointCounts::default()
        };
        let later = few((500..510).map(counts).collect(), &names);
        assert_eq!(later.len(), 10);
        let all = few((0..1000).map(counts).collect(), &names);
        assert_eq!(all.len(), MOST_NAMES + 1);
        for known in later {
            assert!(all.contains(&known), "who had a name keeps it");
        }
        assert_eq!(all[MOST_NAMES].endpoint, "other");
        assert_eq!(all.iter().map(|e| e.requests).sum::<u64>(), 999 * 1000 / 2);
        assert_eq!(all.iter().map(|e| e.logins).sum::<u64>(), 1000);
    }
}
