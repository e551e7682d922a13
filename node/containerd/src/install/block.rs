//! A block of Thaw's lines in another program's configuration file.
//!
//! Invariant: removing the block restores the file byte for byte. So no other line is rewritten, and the block stands at the end, where no
//! line of the owner depends on it.

use thiserror::Error;

const BEGIN: &str =
    "# BEGIN thaw: `thaw install` wrote this, `thaw uninstall` takes it away; changes within are lost.";
const END: &str = "# END thaw";
/// Precedes the words that the installation remembers.
const REMEMBERED: &str = "# remembers:";

/// Why the block of a file cannot be found.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BlockError {
    #[error("line {line}: the block of `thaw install` begins and does not end")]
    Endless { line: usize },
    #[error("line {line}: the block of `thaw install` is there a second time")]
    Second { line: usize },
    #[error("line {line}: it is in the last table of the block of `thaw install`; move it before the block")]
    Within { line: usize },
}

/// A file's text, and the block in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divided<'a> {
    pub before: &'a str,
    /// Its lines without the first and the last.
    pub block: Option<&'a str>,
    pub after: &'a str,
}

/// Finds the block.
pub fn divide(text: &str) -> Result<Divided<'_>, BlockError> {
    let mut at = 0;
    let (mut begin, mut end) = (None, None);
    for (number, line) in text.split_inclusive('\n').enumerate() {
        let (line_at, number) = (at, number + 1);
        at += line.len();
        match line.trim_end() {
            BEGIN if begin.is_none() => begin = Some((line_at, at, number)),
            BEGIN => return Err(BlockError::Second { line: number }),
            END if begin.is_some() && end.is_none() => end = Some((line_at, at, number)),
            _ => {}
        }
    }
    let Some((begin_at, content, line)) = begin else {
        return Ok(Divided {
            before: text,
            block: None,
            after: "",
        });
    };
    let (content_end, end_at, end_line) = end.ok_or(BlockError::Endless { line })?;
    let after = &text[end_at..];
    // Keys after the block would belong to the block's last table.
    for (number, line) in after.lines().enumerate() {
        match line.trim_start().chars().next() {
            None | Some('#') => {}
            Some('[') => break,
            Some(_) => {
                return Err(BlockError::Within {
                    line: end_line + 1 + number,
                });
            }
        }
    }
    Ok(Divided {
        before: &text[..begin_at],
        block: Some(&text[content..content_end]),
        after,
    })
}

/// The file without the block.
pub fn without(text: &str) -> Result<String, BlockError> {
    let Divided { before, block, after } = divide(text)?;
    Ok(match block {
        None => text.to_owned(),
        // Also the newline that was added to the owner's last line.
        Some(block) if remembers(block, UNENDED) => {
            format!("{}{after}", before.strip_suffix('\n').unwrap_or(before))
        }
        Some(_) => format!("{before}{after}"),
    })
}

/// Remembered: the owner's last line had no newline.
const UNENDED: &str = "unended-line";

/// The file with a block of these lines, instead of an earlier block. `remembered` are words for [`remembers`].
pub fn with(text: &str, lines: &str, remembered: &[&str]) -> Result<String, BlockError> {
    let owners = without(text)?;
    let mut words = remembered.to_vec();
    let unended = !owners.is_empty() && !owners.ends_with('\n');
    if unended {
        words.push(UNENDED);
    }
    let end_of_line = if unended { "\n" } else { "" };
    let words = match words.as_slice() {
        [] => String::new(),
        words => format!("{REMEMBERED} {}\n", words.join(" ")),
    };
    Ok(format!(
        "{owners}{end_of_line}{BEGIN}\n{words}{}\n{END}\n",
        lines.trim_end()
    ))
}

/// Whether a block remembers this word.
pub fn remembers(block: &str, word: &str) -> bool {
    let words = block
        .lines()
        .next()
        .and_then(|first| first.strip_prefix(REMEMBERED));
    words.is_some_and(|words| words.split_whitespace().any(|w| w == word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LINES: &str = "[a.b]\nc = 1\n";

    #[test]
    fn it_stands_at_the_end_and_is_replaced_where_it_is() {
        let once = with("x = 1\n", LINES, &["made"]).unwrap();
        assert!(once.starts_with("x = 1\n# BEGIN thaw"), "{once}");
        assert!(once.ends_with("[a.b]\nc = 1\n# END thaw\n"), "{once}");
        assert_eq!(with(&once, LINES, &["made"]).unwrap(), once);
        let other = with(&once, "[d]\n", &[]).unwrap();
        assert!(!other.contains("[a.b]") && other.contains("[d]"), "{other}");
        let block = divide(&once).unwrap().block.unwrap();
        assert!(remembers(block, "made") && !remembers(block, "mad"));
    }

    #[test]
    fn what_follows_it_must_not_be_of_its_last_table() {
        let text = format!("{}key = 2\n", with("", LINES, &[]).unwrap());
        let lines = text.lines().count();
        assert_eq!(without(&text), Err(BlockError::Within { line: lines }));
        let text = format!("{}\n# said\n[own]\nkey = 2\n", with("", LINES, &[]).unwrap());
        assert_eq!(without(&text).unwrap(), "\n# said\n[own]\nkey = 2\n");
    }

    #[test]
    fn half_a_block_and_two_are_told() {
        let whole = with("", LINES, &[]).unwrap();
        let half = whole.replace(END, "");
        assert_eq!(divide(&half), Err(BlockError::Endless { line: 1 }));
        let twice = format!("{whole}{whole}");
        assert!(matches!(divide(&twice), Err(BlockError::Second { .. })));
    }

    proptest! {
        #[test]
        fn without_it_the_file_is_what_it_was(text in "([a-z\\[\\]=#\" \\r]{0,12}\n){0,6}[a-z\\[\\]= ]{0,8}") {
            let written = with(&text, LINES, &["made"]).unwrap();
            prop_assert_eq!(without(&written).unwrap(), text.clone());
            let again = with(&written, "[other]\n", &[]).unwrap();
            prop_assert_eq!(without(&again).unwrap(), text);
        }

        #[test]
        fn no_text_makes_it_panic(text in "(# BEGIN thaw: .{0,3}|# END thaw|[a-z=\\[\\]]{0,4}|\n){0,12}") {
            let _ = without(&text).map(|t| with(&t, LINES, &[]));
        }
    }
}
