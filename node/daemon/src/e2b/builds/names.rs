//! Names and tags of templates, as callers write them.

use thaw_sandbox::id;

use super::super::failure::Failure;
use super::super::template::MAX_NAME;
use super::record::{DEFAULT_TAG, MAX_TAGS};

/// Longest tag, bytes.
const MAX_TAG: usize = 128;
/// Words in paths of the API, which no template may have as its name.
const WORDS: [&str; 2] = ["aliases", "tags"];

/// A name, and the tag after it if there is one.
pub fn split(text: &str) -> (&str, Option<&str>) {
    match text.split_once(':') {
        Some((name, tag)) => (name, Some(tag)),
        None => (text, None),
    }
}

/// The tags of a build that is requested with these, and with a name that has this one.
///
/// # Errors
/// One cannot be a tag, or there are too many.
pub fn tags(of_name: Option<&str>, given: &[String]) -> Result<Vec<String>, Failure> {
    let mut tags: Vec<String> = of_name.map(str::to_owned).into_iter().collect();
    tags.extend_from_slice(given);
    if tags.is_empty() {
        tags.push(DEFAULT_TAG.to_owned());
    }
    check_tags(&tags)?;
    tags.sort();
    tags.dedup();
    Ok(tags)
}

fn is_plain(text: &str, most: usize, others: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || others.contains(c);
    (1..=most).contains(&text.len()) && text.chars().all(is_plain)
}

/// Checks the name of a template.
///
/// # Errors
/// It cannot be one.
pub fn check_name(name: &str) -> Result<(), Failure> {
    let is_good = is_plain(name, MAX_NAME, "-_./") && !id::is_id(name) && !WORDS.contains(&name);
    match is_good {
        true => Ok(()),
        false => Err(Failure::Bad(format!(
            "name is {name:?}; it may have 1 to {MAX_NAME} of A-Z a-z 0-9 - _ . / and is neither 12 hexadecimal digits nor one of {}",
            WORDS.join(", ")
        ))),
    }
}

/// Checks tags.
///
/// # Errors
/// One cannot be a tag, or there are too many.
pub fn check_tags(tags: &[String]) -> Result<(), Failure> {
    if let Some(wrong) = tags.iter().find(|tag| !is_plain(tag, MAX_TAG, "-_.")) {
        let why = format!("tags: {wrong:?} is none; a tag has 1 to {MAX_TAG} of A-Z a-z 0-9 - _ .");
        return Err(Failure::Bad(why));
    }
    check_count(tags.len())
}

/// Checks how many tags a template has.
///
/// # Errors
/// There are too many.
pub fn check_count(tags: usize) -> Result<(), Failure> {
    match tags > MAX_TAGS {
        true => Err(Failure::Bad(format!(
            "tags: a template has at most {MAX_TAGS}; remove some"
        ))),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_tags_are_plain_words() {
        assert_eq!(split("team/web:v1"), ("team/web", Some("v1")));
        assert!(check_name("team/web-1.0_x").is_ok());
        for wrong in [
            "",
            "a b",
            "a:b",
            "é",
            "0123456789ab",
            "tags",
            &"a".repeat(MAX_NAME + 1),
        ] {
            assert!(check_name(wrong).is_err(), "{wrong}");
        }
        assert_eq!(tags(None, &[]).ok(), Some(vec!["default".to_owned()]));
        let given = ["b".to_owned(), "a".to_owned(), "b".to_owned()];
        assert_eq!(
            tags(Some("v1"), &given).ok(),
            Some(["a", "b", "v1"].map(str::to_owned).into())
        );
        for wrong in ["", "a/b", "a:b"] {
            assert!(tags(Some(wrong), &[]).is_err(), "{wrong}");
        }
        let many: Vec<String> = (0..=MAX_TAGS).map(|n| n.to_string()).collect();
        assert!(check_tags(&many).is_err());
    }
}
