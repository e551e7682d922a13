//! How many tests a part's output says passed and failed. Three programs say it: libtest, `tests/e2e/run` and the table of the
//! foreign suites (`tests/containerd/table`).

use serde::{Deserialize, Serialize};

/// What an output counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    pub passed: u64,
    pub failed: u64,
    /// Tests marked `#[ignore]` that the command left out.
    #[serde(default)]
    pub ignored: u64,
    /// Tests of a foreign suite that runc passes and Thaw does not, each with a reason in the suite's document.
    #[serde(default)]
    pub excepted: u64,
}

/// The sum of what `output` counts; `None` where it counts nothing.
pub fn of(output: &str) -> Option<Counts> {
    let mut sum: Option<Counts> = None;
    // What was counted before the end-to-end tests. The results of their programs count a test that was run again twice; the
    // line at their end counts it once, and replaces them.
    let mut before_e2e: Option<Option<Counts>> = None;
    for line in output.lines() {
        if line.starts_with("== ") {
            before_e2e.get_or_insert(sum);
        } else if let Some(counts) = of_libtest(line).or_else(|| of_suite(line)) {
            sum = Some(add(sum, counts));
        } else if let Some(counts) = of_e2e(line) {
            sum = Some(add(before_e2e.take().unwrap_or(sum), counts));
        }
    }
    sum
}

fn add(sum: Option<Counts>, more: Counts) -> Counts {
    let sum = sum.unwrap_or_default();
    Counts {
        passed: sum.passed + more.passed,
        failed: sum.failed + more.failed,
        ignored: sum.ignored + more.ignored,
        excepted: sum.excepted + more.excepted,
    }
}

/// The number before `word` in `line`.
fn before(line: &str, word: &str) -> Option<u64> {
    let end = line.find(word)?;
    line[..end].trim_end().rsplit(' ').next()?.parse().ok()
}

/// `test result: ok. 5 passed; 0 failed; 1 ignored; …`. What another process printed may stand before it in its line.
fn of_libtest(line: &str) -> Option<Counts> {
    let result = &line[line.find("test result: ")?..];
    Some(Counts {
        passed: before(result, " passed;")?,
        failed: before(result, " failed;")?,
        ignored: before(result, " ignored;")?,
        excepted: 0,
    })
}

/// `e2e: 70 passed, 0 failed, 31 not run`.
fn of_e2e(line: &str) -> Option<Counts> {
    let result = line.strip_prefix("e2e: ")?;
    Some(Counts {
        passed: before(result, " passed,")?,
        failed: before(result, " failed,")?,
        ignored: before(result, " not run")?,
        excepted: 0,
    })
}

/// `runc: … Thaw: 155 pass, 11 fail. Passing with runc alone: 12, of which 0 without a reason.`
fn of_suite(line: &str) -> Option<Counts> {
    let (_, thaw) = line.strip_prefix("runc: ")?.split_once(" Thaw: ")?;
    let (summary, alone) = thaw.split_once(" Passing with runc alone: ")?;
    let failed = before(alone, " without a reason")?;
    let all = before(alone, ", of which ")?;
    Some(Counts {
        passed: before(summary, " pass").unwrap_or(0),
        failed,
        ignored: 0,
        excepted: all.checked_sub(failed)?,
    })
}

#[cfg(test)]
#[path = "counts_test.rs"]
mod tests;
