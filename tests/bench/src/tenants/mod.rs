//! What `make bench-tenants` measures: tenants with images and templates of their own beside tenants that share them.
//!
//! | module | what is measured |
//! |---|---|
//! | [`memory`] | what their sandboxes, templates and stores have of the host's memory |
//!
//! Creations are timed here.

pub mod memory;

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};
use thaw_tiny_guest::bare::bare;
use thaw_tiny_node::daemon::log;
use thaw_tiny_node::{Place, Thawd, callers, make_image};

use crate::Report;
use crate::clock::{monotonic_ns, us_since};
use crate::report::mib;

/// Sandboxes of each tenant.
const SANDBOXES: usize = 4;
/// Bytes of the image's one file.
const IMAGE: usize = 32 << 20;
/// What the guest fills of its memory before it becomes a template.
const FILLED_MIB: u32 = 64;

/// Whether tenants have a stock of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stock {
    Shared,
    Separate,
}

impl Stock {
    /// In the order they are measured.
    pub const ALL: [Stock; 2] = [Stock::Shared, Stock::Separate];

    fn word(self) -> &'static str {
        match self {
            Stock::Shared => "shared",
            Stock::Separate => "separate",
        }
    }
}

/// The series of a quantity.
pub fn name(tenants: usize, stock: Stock, what: &str) -> String {
    let word = stock.word();
    match tenants {
        1 => format!("1 tenant, {word}: {what}"),
        _ => format!("{tenants} tenants, {word}: {what}"),
    }
}

/// From the request to the answer that its guest runs, of a tenant's first sandbox.
pub const FIRST: &str = "first creation of a tenant";
/// The same of its others.
pub const LATER: &str = "later creation";
/// All that [`memory`] finds.
pub const MEMORY: &str = "memory, all";

/// A node that has nothing yet, and on it as many tenants with [`SANDBOXES`] each, one tenant after the other.
///
/// # Errors
/// A creation or a deletion that fails, or what cannot be looked at.
pub fn round(binaries: &Path, tenants: usize, stock: Stock, report: &mut Report) -> Result<(), String> {
    let place = Place::new(binaries, &bare(FILLED_MIB)).ok_or("this host cannot run it")?;
    let names: Vec<String> = (1..=tenants).map(|n| format!("tenant-{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    configure(&place, &names, stock);
    let image = make_image(&place.path("large"), "data", &noise());
    let thawd = Thawd::start(&place);
    let mut request = place.request();
    request["image"] = image.into();
    let (mut ids, mut vmms) = (Vec::new(), BTreeSet::new());
    for tenant in &names {
        for number in 0..SANDBOXES {
            let began = monotonic_ns();
            let made = ask(&place, tenant, "POST /v1/sandboxes", &request)?;
            let what = if number == 0 { FIRST } else { LATER };
            report.sample(&name(tenants, stock, what), "ms", us_since(began) / 1e3);
            let made: Value = serde_json::from_str(&made).map_err(|e| format!("a creation's answer: {e}"))?;
            let said = |field: &str| format!("a creation's answer has no {field}");
            let id = made["sandbox"]["id"].as_str().ok_or(said("id"))?;
            ids.push((*tenant, id.to_owned()));
            vmms.insert(made["sandbox"]["vmm_pid"].as_i64().ok_or(said("vmm_pid"))?);
        }
    }
    let found = memory::Memory::of(&vmms, thawd.record().pid, &place.path("data"))?;
    for (part, bytes) in found.parts() {
        let what = format!("memory, {part}");
        report.sample(&name(tenants, stock, &what), "MiB", mib(bytes));
    }
    report.sample(&name(tenants, stock, MEMORY), "MiB", mib(found.whole()));
    // A stop of thawd leaves them.
    for (tenant, id) in ids {
        ask(&place, tenant, &format!("DELETE /v1/sandboxes/{id}"), &json!({}))?;
    }
    match thawd.stop() {
        status if status.success() => Ok(()),
        status => Err(format!("thawd: {status}; {}", log(&place))),
    }
}

/// Nothing is made ahead: each creation is timed whole, and all memory there is belongs to a sandbox.
fn configure(place: &Place, tenants: &[&str], stock: Stock) {
    let api = callers::serve(place, tenants);
    let separate = stock == Stock::Separate;
    let none = "{ low = 0, high = 0 }";
    place.configure(&format!(
        "[api]\nseparate_tenants = {separate}\n{api}[pools]\ndisks = {none}\nnetworks = {none}\ncgroups = {none}\n\
         [pools.shells]\nshapes = 0\n[pools.parked]\ntemplates = 0\n"
    ));
}

/// The body of an answer that is no refusal.
fn ask(place: &Place, tenant: &str, request: &str, body: &Value) -> Result<String, String> {
    let asked = callers::ask(place, tenant, request, body);
    let (status, body) = asked.ok_or_else(|| format!("{request}: no answer; {}", log(place)))?;
    match status.contains(" 20") {
        true => Ok(body),
        false => Err(format!("{request}: {status} {body}; {}", log(place))),
    }
}

/// What does not compress.
fn noise() -> Vec<u8> {
    let mut state = 88_172_645_463_325_252u64;
    let byte = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..IMAGE).map(byte).collect()
}
