//! `[pools]`: how many of the resources of sandboxes thawd makes ahead.

use std::num::NonZero;

use serde::{Deserialize, Serialize};
use thaw_pools::plan::{Watermarks, WatermarksError};

/// `[pools]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PoolsConfig {
    /// Number of resources of one kind that are made at once.
    pub makers: NonZero<u8>,
    /// Whether sandboxes of 256 MiB and more get templates of their own once they are in demand.
    pub larger_templates: bool,
    /// Writable layers.
    pub disks: Marks,
    /// Network namespaces with their taps.
    pub networks: Marks,
    pub cgroups: Marks,
    /// thaw-vmm processes with an empty machine.
    pub shells: ShellsConfig,
    /// thaw-vmm processes with a template or a snapshot in their machine.
    pub parked: ParkedConfig,
}

/// `[pools.shells]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ShellsConfig {
    /// Number of machine shapes (CPUs and memory) with a pool: the most recently used ones. 0: none.
    pub shapes: u8,
    /// Number of shells of each shape.
    pub each: Marks,
}

/// `[pools.parked]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ParkedConfig {
    /// Number of templates with a pool: the most recently used ones. 0: none.
    pub templates: u8,
    /// Number of users' snapshots with a pool: those thawed most recently. 0: none.
    pub snapshots: u8,
    /// Number of parked machines of each template and snapshot: as many as were claimed recently, within these bounds.
    pub each: Marks,
    /// The period that counts as recent, seconds.
    pub within_s: NonZero<u32>,
}

impl Default for ParkedConfig {
    fn default() -> Self {
        Self {
            templates: 2,
            snapshots: 4,
            each: Marks(Watermarks::half_of(2).up_to(16)),
            within_s: NonZero::<u32>::MIN.saturating_add(119),
        }
    }
}

impl Default for ShellsConfig {
    fn default() -> Self {
        Self {
            shapes: 2,
            each: Marks(Watermarks::half_of(4)),
        }
    }
}

impl Default for PoolsConfig {
    fn default() -> Self {
        Self {
            makers: NonZero::<u8>::MIN.saturating_add(1),
            larger_templates: true,
            disks: Marks::default(),
            networks: Marks::default(),
            cgroups: Marks::default(),
            shells: ShellsConfig::default(),
            parked: ParkedConfig::default(),
        }
    }
}

/// When a pool is refilled, and how far. `high = 0`: nothing is made ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Given", into = "Given")]
pub struct Marks(Watermarks);

/// The form in the file: `high`, and `low`, which defaults to half of it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Given {
    low: Option<usize>,
    high: usize,
}

impl Default for Marks {
    fn default() -> Self {
        Self(Watermarks::half_of(8))
    }
}

impl TryFrom<Given> for Marks {
    type Error = WatermarksError;

    fn try_from(given: Given) -> Result<Marks, WatermarksError> {
        let low = given.low.unwrap_or(given.high.div_ceil(2));
        Watermarks::new(low, given.high).map(Marks)
    }
}

impl From<Marks> for Given {
    fn from(Marks(marks): Marks) -> Given {
        Given {
            low: Some(marks.low()),
            high: marks.high(),
        }
    }
}

impl From<Marks> for Watermarks {
    fn from(Marks(marks): Marks) -> Watermarks {
        marks
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    fn marks(text: &str) -> Result<(usize, usize), String> {
        Config::parse(text).map(|config| (config.pools.disks.0.low(), config.pools.disks.0.high()))
    }

    #[test]
    fn the_low_mark_is_half_of_the_high_one_unless_it_is_given() {
        assert_eq!(marks(""), Ok((4, 8)));
        assert_eq!(marks("[pools.disks]\nlow = 2\nhigh = 8"), Ok((2, 8)));
        assert_eq!(marks("[pools]\ndisks = { high = 5 }"), Ok((3, 5)));
        assert_eq!(marks("[pools.disks]\nhigh = 0"), Ok((0, 0)));
        let written = toml::to_string(&Config::parse("[pools]\nmakers = 3\ndisks = { high = 5 }").unwrap());
        assert_eq!(marks(&written.unwrap()), Ok((3, 5)));
    }

    #[test]
    fn errors_name_line_and_key() {
        for (text, line, key) in [
            ("[pools]\ndisks = { low = 9, high = 4 }\n", "line 2", "low is 9"),
            (
                "[pools]\n\n[pools.networks]\nlow = 9\nhigh = 4\n",
                "line 3",
                "networks",
            ),
            ("[pools]\ncgroups = { low = 0, high = 1 }", "line 2", "cgroups"),
            ("[pools]\ncgroups = { low = 1 }", "line 2", "high"),
            ("[pools.shells]\nshapes = 256", "line 2", "shapes"),
            ("[pools.shells]\neach = { high = 4097 }", "line 2", "each"),
            ("[pools.parked]\nwithin_s = 0", "line 2", "within_s"),
            ("[pools.cgroups]\nhigh = 100000", "line 1", "100000"),
            ("[pools.cgroups]\nhigh = -1", "line 2", "high"),
            ("[pools]\nmakers = 0", "line 2", "makers"),
            ("[pools]\nvolumes = 4", "line 2", "volumes"),
            ("[pools.disks]\nhihg = 4", "line 2", "hihg"),
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(error.contains(line) && error.contains(key), "{error}");
        }
    }
}
