//! The known name that is closest to an unknown one, for errors about mistyped names.

/// Least similarity of a suggestion, from 0 to 1: the one that `thaw` uses for flags and commands.
const LEAST: f64 = 0.7;
/// Longest name that is compared, in bytes.
const LONGEST: usize = 256;

/// `; the closest is NAME`, or nothing if no known name is similar. Case does not count.
pub fn closest<'a>(wanted: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let wanted = wanted.to_lowercase();
    if wanted.len() > LONGEST {
        return String::new();
    }
    let scored = known
        .into_iter()
        .filter(|name| name.len() <= LONGEST)
        .map(|name| {
            let score = strsim::jaro(&wanted, &name.to_lowercase());
            (score, name)
        });
    let best = scored
        .filter(|(score, _)| *score > LEAST)
        .max_by(|(a, _), (b, _)| a.total_cmp(b));
    best.map_or_else(String::new, |(_, name)| format!("; the closest is {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_names_are_suggested_and_others_are_not() {
        let known = ["nofile", "nproc", "memlock"];
        for (wanted, expected) in [
            ("nofiles", "; the closest is nofile"),
            ("NOFILE", "; the closest is nofile"),
            ("mlock", "; the closest is memlock"),
            ("zzz", ""),
            ("", ""),
            (&"n".repeat(300), ""),
        ] {
            assert_eq!(closest(wanted, known), expected, "{wanted}");
        }
        assert_eq!(closest("web", []), "");
    }
}
