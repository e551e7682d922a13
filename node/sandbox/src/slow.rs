//! All reasons why a start can be slower than it could have been.

macro_rules! slow {
    ($($(#[$doc:meta])* $name:ident = $code:literal $(, $miss:ident)?;)*) => {
        /// A reason.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Slow {
            $($(#[$doc])* $name,)*
        }

        impl Slow {
            /// All of them.
            pub const ALL: &'static [Slow] = &[$(Slow::$name),*];

            /// The code in accounts, headers and metrics.
            pub const fn code(self) -> &'static str {
                match self {
                    $(Slow::$name => $code,)*
                }
            }

            /// Whether the reason is that a pool had no ready resource.
            pub const fn is_miss(self) -> bool {
                match self {
                    $(Slow::$name => slow!(@ $($miss)?),)*
                }
            }
        }
    };
    (@) => { false };
    (@ miss) => { true };
}

slow! {
    DiskMade = "disk-made", miss;
    NetworkMade = "network-made", miss;
    CgroupMade = "cgroup-made", miss;
    NoShell = "no-shell", miss;
    NoParkedVm = "no-parked-vm", miss;
    /// Without root, the network reaches only its gateway.
    NetworkInward = "network-inward";
    TemplateBuilt = "template-built";
    NoWorkingSet = "no-working-set";
    /// The snapshot was compared with its hashes during this start.
    SnapshotVerified = "snapshot-verified";
    PagesNotResident = "pages-not-resident";
    /// The first machine was lost before it was ready.
    MadeAgain = "machine-made-again";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_have_codes_of_their_own_and_some_are_misses() {
        let mut codes: Vec<&str> = Slow::ALL.iter().map(|slow| slow.code()).collect();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), Slow::ALL.len());
        let misses: Vec<Slow> = Slow::ALL.iter().copied().filter(|slow| slow.is_miss()).collect();
        assert!(misses.contains(&Slow::NoParkedVm) && !misses.contains(&Slow::MadeAgain));
    }
}
