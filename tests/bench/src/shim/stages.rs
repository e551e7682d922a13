//! Where thawd's part of starts went, from its metrics (docs/metrics.md), between two moments.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use thaw_e2e::home::Home;

/// What thawd counts, by a metric's name with its labels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stages(BTreeMap<String, f64>);

const WHOLE: &str = "thaw_start_seconds";
const STAGE: &str = "thaw_start_stage_seconds";
/// What every thaw has, and a boot has not.
const THAW: &str = "thaw";
/// Why one is slow whose template was not there.
const BUILT: &str = "thaw_start_slow_total{how=\"create\",reason=\"template-built\"}";

impl Stages {
    /// So far.
    ///
    /// # Errors
    /// Where thawd does not answer.
    pub fn of(home: &Home) -> Result<Stages, String> {
        let socket = home.run().join("thawd.sock");
        let failed = |e: std::io::Error| format!("thawd's metrics at {}: {e}", socket.display());
        let mut stream = UnixStream::connect(&socket).map_err(failed)?;
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\nhost: thawd\r\nconnection: close\r\n\r\n")
            .map_err(failed)?;
        let mut text = String::new();
        stream.read_to_string(&mut text).map_err(failed)?;
        Ok(Stages::read(&text))
    }

    /// Its lines are a name with labels, a blank, a value; whatever is not is left out.
    fn read(text: &str) -> Stages {
        let line = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            let known = name.starts_with("thaw_start_") && !name.contains("_bucket");
            known.then_some((name.to_owned(), value.parse().ok()?))
        };
        Stages(text.lines().filter_map(line).collect())
    }

    /// What came since an earlier moment.
    pub fn since(&self, before: &Stages) -> Stages {
        let earlier = |name: &String| before.0.get(name).copied().unwrap_or(0.0);
        let grown = self
            .0
            .iter()
            .map(|(name, value)| (name.clone(), value - earlier(name)));
        Stages(grown.collect())
    }

    fn get(&self, name: &str) -> f64 {
        self.0.get(name).copied().unwrap_or(0.0)
    }

    /// Of all starts together, seconds.
    pub fn whole(&self) -> f64 {
        self.get(&format!("{WHOLE}_sum{{how=\"create\"}}"))
    }

    /// By stage, seconds; some run beside each other. Those that were.
    pub fn seconds(&self) -> Vec<(String, f64)> {
        let prefix = format!("{STAGE}_sum{{how=\"create\",stage=\"");
        let of = |(name, value): (&String, &f64)| {
            let stage = name.strip_prefix(&prefix)?.strip_suffix("\"}")?;
            (self.starts(stage) > 0.0).then(|| (stage.to_owned(), *value))
        };
        self.0.iter().filter_map(of).collect()
    }

    /// How many had a stage.
    fn starts(&self, stage: &str) -> f64 {
        self.get(&format!("{STAGE}_count{{how=\"create\",stage=\"{stage}\"}}"))
    }

    /// Refuses starts that were not `count` thaws of templates that were there.
    ///
    /// # Errors
    /// Says what they were.
    pub fn check_thawed(&self, count: u64) -> Result<(), String> {
        let (made, thawed) = (
            self.get(&format!("{WHOLE}_count{{how=\"create\"}}")),
            self.starts(THAW),
        );
        let built = self.get(BUILT);
        // Counted in whole numbers, far below where they would not be exact.
        let expected = count as f64;
        match (made, thawed, built) == (expected, expected, 0.0) {
            true => Ok(()),
            false => Err(format!(
                "of {count} starts thawd made {made}, thawed {thawed}, and built a template for {built}: a cold boot is not what is measured"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "HTTP/1.1 200 OK\r\n\r\n# TYPE thaw_start_seconds histogram\n\
        thaw_start_seconds_sum{how=\"create\"} 1\nthaw_start_seconds_count{how=\"create\"} 4\n\
        thaw_start_stage_seconds_sum{how=\"create\",stage=\"thaw\"} 0.5\n\
        thaw_start_stage_seconds_count{how=\"create\",stage=\"thaw\"} 4\n";
    const AFTER: &str = "thaw_start_seconds_sum{how=\"create\"} 1.25\nthaw_start_seconds_count{how=\"create\"} 5\n\
        thaw_start_seconds_bucket{how=\"create\",le=\"1\"} 5\n\
        thaw_start_stage_seconds_sum{how=\"create\",stage=\"thaw\"} 0.75\n\
        thaw_start_stage_seconds_count{how=\"create\",stage=\"thaw\"} 5\n";

    #[test]
    fn what_one_start_took_is_what_was_counted_meanwhile() {
        let spent = Stages::read(AFTER).since(&Stages::read(BEFORE));
        assert_eq!(spent.whole(), 0.25);
        assert_eq!(spent.seconds(), [("thaw".to_owned(), 0.25)]);
        assert_eq!(spent.check_thawed(1), Ok(()));
        assert!(spent.check_thawed(2).is_err());
    }

    #[test]
    fn a_boot_and_a_template_that_was_not_there_are_refused() {
        let cold = AFTER.replace("stage=\"thaw\"} 5", "stage=\"thaw\"} 4");
        assert!(
            Stages::read(&cold)
                .since(&Stages::read(BEFORE))
                .check_thawed(1)
                .is_err()
        );
        let built = format!("{AFTER}{BUILT} 1\n");
        assert!(
            Stages::read(&built)
                .since(&Stages::read(BEFORE))
                .check_thawed(1)
                .is_err()
        );
    }
}
