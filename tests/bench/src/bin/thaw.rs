//! `make bench-thaw`, its part with tiny guests: claim to first guest byte on this machine's own KVM.

use std::io;
use std::path::Path;
use std::process::ExitCode;

use thaw_bench::clock::{monotonic_ns, us_since};
use thaw_bench::thaw::clone::Template;
use thaw_bench::thaw::floor::{Depth, Frozen, Shell, template_memory};
use thaw_bench::thaw::pooled_floor::{self, PooledFloor};
use thaw_bench::thaw::{cost, qemu, storm};
use thaw_bench::{Report, by_quick, table};

/// How much is measured.
struct Plan {
    /// Samples of each quantity that is measured alone; one round more, which warms caches, is not counted.
    rounds: usize,
    /// Clones at once, and how often.
    at_once: [(usize, usize); 3],
    /// How often the cost of [`PARKED`] clones is measured.
    costs: usize,
}

const WHOLE: Plan = Plan {
    rounds: 100,
    at_once: [(FEW, 20), (200, 20), (1000, 20)],
    costs: 3,
};
/// To see that all of it works, and about where it stands.
const QUICK: Plan = Plan {
    rounds: 20,
    at_once: [(FEW, 5), (200, 1), (1000, 1)],
    costs: 1,
};

/// As many at once as one claim is to be compared with.
const FEW: usize = 50;
/// Parked clones whose cost is measured.
const PARKED: usize = 200;
/// Guest memory, MiB.
const SIZES: [u32; 2] = [128, 1024];

fn main() -> ExitCode {
    let result = match std::env::args().nth(1).as_deref() {
        Some(pooled_floor::ARGUMENT) => pooled_floor::serve().map_err(|e| e.to_string()),
        _ => measure(by_quick(&QUICK, &WHOLE)).map(|report| print!("{}", table::terminal(&report))),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("bench-thaw: {why}");
            ExitCode::FAILURE
        }
    }
}

fn measure(plan: &Plan) -> Result<Report, String> {
    let directory = tempfile::tempdir().map_err(|e| format!("no temporary directory: {e}"))?;
    let mut report = Report::new("thaw");
    let subjects = SIZES
        .iter()
        .map(|&memory_mib| Subjects::build(memory_mib, directory.path(), &mut report))
        .collect::<Result<Vec<_>, _>>()?;
    for round in 0..=plan.rounds {
        for subject in &subjects {
            let counted = (round > 0).then_some(&mut report);
            subject
                .round(counted)
                .map_err(|e| format!("round {round}, {} MiB: {e}", subject.memory_mib))?;
        }
        progress("round", round, plan.rounds);
    }
    let template = &subjects[0].template;
    for (count, rounds) in plan.at_once {
        for round in 1..=rounds {
            at_once(&mut report, template, count)
                .map_err(|e| format!("{count} at once, round {round}: {e}"))?;
            progress(&format!("{count} at once"), round, rounds);
        }
    }
    for round in 1..=plan.costs {
        parked_cost(&mut report, template, PARKED).map_err(|e| format!("cost of {} parked: {e}", PARKED))?;
        progress("cost", round, plan.costs);
    }
    ratios(&mut report)?;
    report
        .write(Path::new("target/bench"))
        .map_err(|e| format!("cannot write target/bench: {e}"))?;
    Ok(report)
}

/// Says how far it is, now and then.
fn progress(what: &str, done: usize, of: usize) {
    if done == of || done.is_multiple_of(10) && done > 0 {
        eprintln!("bench-thaw: {what} {done} of {of}");
    }
}

/// All that is measured at one memory size, in turn.
struct Subjects {
    memory_mib: u32,
    floor: Frozen,
    pooled: PooledFloor,
    template: Template,
    qemu: Option<qemu::Saved>,
}

impl Subjects {
    fn build(memory_mib: u32, directory: &Path, report: &mut Report) -> Result<Subjects, String> {
        let at = |what: &str| {
            let what = format!("{what}, {memory_mib} MiB");
            move |e: io::Error| format!("{what}: {e}")
        };
        let memory = template_memory(memory_mib).map_err(at("the floor's template"))?;
        let qemu = match qemu::Saved::build(memory_mib, directory) {
            Ok(saved) => Some(saved),
            Err(why) => {
                report.note(format!("No QEMU rows at {memory_mib} MiB: {why}."));
                None
            }
        };
        Ok(Subjects {
            memory_mib,
            pooled: PooledFloor::spawn(&memory).map_err(at("the floor's process"))?,
            floor: Frozen::new(memory).map_err(at("the floor"))?,
            template: Template::build(memory_mib, true, directory).map_err(at("the template"))?,
            qemu,
        })
    }

    /// One sample of each quantity, in turn.
    fn round(&self, mut report: Option<&mut Report>) -> io::Result<()> {
        let size = size(self.memory_mib);
        let mut sample = |what: &str, us: f64| {
            if let Some(report) = &mut report {
                report.sample(&format!("{what}, {size}"), "µs", us);
            }
        };
        sample(FLOOR_SET, self.floor_set()?);
        sample(FLOOR_POOLED, self.pooled.claim()?);
        sample(PARKED_BYTE, self.template.from_parked()?);
        sample(FLOOR_REGISTERS, self.floor_mapped(Depth::Registers)?);
        sample(FLOOR_MAPPED, self.floor_mapped(Depth::Whole)?);
        sample(SHELL_BYTE, self.template.from_shell()?);
        sample(FLOOR_CREATED, self.floor_created()?);
        sample(SPAWN_BYTE, self.template.from_nothing()?);
        if let Some(qemu) = &self.qemu {
            sample(QEMU_BYTE, qemu.restore()?);
        }
        Ok(())
    }

    fn floor_set(&self) -> io::Result<f64> {
        let mut shell = self.floor.shell()?;
        self.floor.restore(&shell, Depth::Whole)?;
        let start = monotonic_ns();
        shell.run()?;
        Ok(us_since(start))
    }

    fn floor_mapped(&self, depth: Depth) -> io::Result<f64> {
        let mut shell = self.floor.shell()?;
        let start = monotonic_ns();
        self.run_restored(&mut shell, depth)?;
        Ok(us_since(start))
    }

    fn floor_created(&self) -> io::Result<f64> {
        let start = monotonic_ns();
        let mut shell = self.floor.shell()?;
        self.run_restored(&mut shell, Depth::Whole)?;
        Ok(us_since(start))
    }

    fn run_restored(&self, shell: &mut Shell, depth: Depth) -> io::Result<()> {
        self.floor.restore(shell, depth)?;
        shell.run()
    }
}

const FLOOR_SET: &str = "floor: all set, run";
const FLOOR_POOLED: &str = "floor: all set, run, in another process";
const PARKED_BYTE: &str = "thaw: parked to first byte";
const FLOOR_REGISTERS: &str = "floor: map template, set registers, run";
const FLOOR_MAPPED: &str = "floor: map template, set whole vCPU, run";
const SHELL_BYTE: &str = "thaw: shell and template to first byte";
const FLOOR_CREATED: &str = "floor: create VM, map, set, run";
const SPAWN_BYTE: &str = "thaw: process spawn to first byte";
const QEMU_BYTE: &str = "qemu microvm: spawn and restore to first byte";

fn size(memory_mib: u32) -> String {
    match memory_mib {
        1024.. => format!("{} GiB", memory_mib / 1024),
        _ => format!("{memory_mib} MiB"),
    }
}

fn at_once(report: &mut Report, template: &Template, count: usize) -> io::Result<()> {
    let mut clones = storm::park(template, count)?;
    let taken = storm::thaw(&mut clones)?;
    storm::end(clones);
    for us in taken {
        report.sample(&at_once_name(count), "ms", us / 1e3);
    }
    Ok(())
}

fn at_once_name(count: usize) -> String {
    format!("thaw: {count} parked at once, common start to first byte")
}

fn parked_cost(report: &mut Report, template: &Template, count: usize) -> io::Result<()> {
    let before = cost::available()?;
    let clones = storm::park(template, count)?;
    let parked = cost::available()?;
    for clone in &clones {
        let footprint = cost::footprint(&clone.vmm, template.memory_mib)?;
        report.sample(
            &format!("{count} parked: PSS above the template, each"),
            "KiB",
            footprint.vmm + footprint.written,
        );
    }
    storm::end(clones);
    // What else happens on the machine in the meantime counts half.
    let taken = before.midpoint(cost::available()?) - parked;
    report.sample(
        &format!("{count} parked: MemAvailable each"),
        "KiB",
        taken / count as f64,
    );
    Ok(())
}

fn ratios(report: &mut Report) -> Result<(), String> {
    let small = |what: &str| format!("{what}, {}", size(SIZES[0]));
    let large = |what: &str| format!("{what}, {}", size(SIZES[1]));
    report.ratio("parked_over_floor", &small(PARKED_BYTE), &small(FLOOR_SET))?;
    report.ratio(
        "parked_over_pooled_floor",
        &small(PARKED_BYTE),
        &small(FLOOR_POOLED),
    )?;
    report.ratio("shell_over_floor", &small(SHELL_BYTE), &small(FLOOR_MAPPED))?;
    report.ratio("spawn_over_floor", &small(SPAWN_BYTE), &small(FLOOR_CREATED))?;
    report.ratio("mem_1g_over_128m", &large(PARKED_BYTE), &small(PARKED_BYTE))?;
    report.ratio("shell_mem_1g_over_128m", &large(SHELL_BYTE), &small(SHELL_BYTE))?;
    let name = at_once_name(FEW);
    report.ratio_of(&format!("p99_over_p50_at_{FEW}"), (&name, 99.0), (&name, 50.0))?;
    if report.percentile((&small(QEMU_BYTE), 50.0)).is_ok() {
        report.ratio("spawn_over_qemu_restore", &small(SPAWN_BYTE), &small(QEMU_BYTE))?;
        report.note(
            "QEMU ran on this machine's own KVM. Its guest only writes to the serial port and has no data in memory, so QEMU restores \
             less than thaw-vmm.",
        );
    }
    let added =
        report.percentile((&small(FLOOR_POOLED), 50.0))? - report.percentile((&small(FLOOR_SET), 50.0))?;
    report.note(format!(
        "The floor runs the guest in the thread that claims it. A claim from any other process adds two wake-ups, {added:.0} µs here. \
         `{FLOOR_POOLED}` includes them, and `parked_over_pooled_floor` compares with that row."
    ));
    Ok(())
}
