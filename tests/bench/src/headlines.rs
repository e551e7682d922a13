//! The README's table: the ratios by which Thaw is to be judged first, each as `docs/bench` keeps it. What Thaw is worse at than
//! its peer is among them.

use crate::{Report, provenance};

struct Headline {
    /// The report that has the ratio.
    report: &'static str,
    ratio: &'static str,
    /// What is divided by what.
    meaning: &'static str,
}

const HEADLINES: [Headline; 6] = [
    Headline {
        report: "thaw-linux",
        ratio: "thaw_over_coldboot_linux",
        meaning: "Linux guest ready: thawed from a parked machine / booted",
    },
    Headline {
        report: "thaw",
        ratio: "spawn_over_qemu_restore",
        meaning: "tiny guest's first byte, process start included: Thaw / QEMU microvm restoring a snapshot",
    },
    Headline {
        report: "snapshot-python",
        ratio: "first_response_over_cold_start",
        meaning: "a warm Python server's first page: thawed from its snapshot / started from its image",
    },
    Headline {
        report: "image",
        ratio: "soci_over_full_1g",
        meaning: "first start of a large image with a SOCI index: lazy / pulled whole",
    },
    Headline {
        report: "shim",
        ratio: "ctr_run_over_runc",
        meaning: "`ctr run --rm` of `true`: Thaw / runc",
    },
    Headline {
        report: "shim",
        ratio: "idle_pod_over_runc",
        meaning: "memory of an idle pod: Thaw, guest included / runc",
    },
];

/// The table, of the results in `kept`. Fails if one of them or its ratio is missing.
pub fn markdown(kept: &[Report]) -> Result<String, String> {
    let mut out =
        String::from("| What is compared | Ratio | Printed by | Measured at |\n|---|---:|---|---|\n");
    for headline in &HEADLINES {
        let found = kept.iter().find(|report| report.name == headline.report);
        let report = found.ok_or(format!("no result of {}", headline.report))?;
        let ratio = report.ratios.get(headline.ratio);
        let ratio = ratio.ok_or(format!("{} has no ratio {}", report.name, headline.ratio))?;
        let place = if report.machine.contains("nested lab") {
            "emulated"
        } else {
            "native"
        };
        out += &format!(
            "| {} | **{ratio:.2}** | `{}` | `{}`, {place} |\n",
            headline.meaning,
            provenance::command(&report.name),
            report.commit
        );
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results() -> Vec<Report> {
        let mut names: Vec<_> = HEADLINES.iter().map(|headline| headline.report).collect();
        names.dedup();
        let mut reports: Vec<Report> = names.into_iter().map(Report::new).collect();
        for headline in &HEADLINES {
            let report = reports.iter_mut().find(|r| r.name == headline.report);
            report.unwrap().ratios.insert(headline.ratio.into(), 0.456);
        }
        reports
    }

    #[test]
    fn each_headline_has_its_ratio_command_and_commit() {
        let mut reports = results();
        reports[0].commit = "abc".into();
        reports[0].machine = "the nested lab".into();
        let text = markdown(&reports).unwrap();
        assert_eq!(text.lines().count(), 2 + HEADLINES.len());
        let first = text.lines().nth(2).unwrap();
        assert!(
            first.ends_with("| **0.46** | `make bench-thaw` | `abc`, emulated |"),
            "{first}"
        );
    }

    #[test]
    fn missing_result_or_ratio_is_an_error() {
        let mut reports = results();
        reports[1].ratios.clear();
        assert_eq!(
            markdown(&reports).unwrap_err(),
            "thaw has no ratio spawn_over_qemu_restore"
        );
        assert_eq!(markdown(&[]).unwrap_err(), "no result of thaw-linux");
    }
}
