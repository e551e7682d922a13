//! containerd's filters for snapshots: `name`, `parent`, `kind` and `labels.NAME`, compared with `==` or `!=` or tested for presence, and
//! joined by commas. containerd sends only these forms to a snapshotter.
//!
//! Grammar: containerd's `pkg/filters`. `~=` (regular expressions) is refused by name.

use thaw_protocol::snapshots::Kind;

use super::record::Record;

/// Matches if all its selectors match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter(Vec<Selector>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Selector {
    field: Vec<String>,
    test: Test,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    Present,
    Equal(String),
    NotEqual(String),
}

/// Why a filter is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("filter {filter:?}: {problem} at byte {at}")]
pub struct FilterError {
    filter: String,
    at: usize,
    problem: &'static str,
}

impl Filter {
    /// Parses a filter; an empty one matches everything.
    ///
    /// # Errors
    /// It is invalid, or uses an unsupported comparison.
    pub fn parse(text: &str) -> Result<Filter, FilterError> {
        let mut scanner = Scanner { text, at: 0 };
        let mut selectors = Vec::new();
        if text.is_empty() {
            return Ok(Filter(selectors));
        }
        loop {
            selectors.push(scanner.selector()?);
            match scanner.rest().chars().next() {
                None => return Ok(Filter(selectors)),
                Some(',') => scanner.at += 1,
                Some(_) => return Err(scanner.problem("a comma or the end is expected")),
            }
        }
    }

    /// Whether a snapshot matches.
    pub fn holds(&self, record: &Record) -> bool {
        self.0.iter().all(|selector| selector.holds(record))
    }
}

impl Selector {
    fn holds(&self, record: &Record) -> bool {
        let value = value(&self.field, record);
        match &self.test {
            Test::Present => value.is_some(),
            Test::Equal(wanted) => value.is_some_and(|value| value == wanted),
            Test::NotEqual(wanted) => value.is_none_or(|value| value != wanted),
        }
    }
}

/// The value of a field, if it exists.
fn value<'a>(field: &[String], record: &'a Record) -> Option<&'a str> {
    let text = match field {
        [name] if name == "name" => &record.name,
        [name] if name == "parent" => &record.parent,
        [name] if name == "kind" => {
            return match record.kind() {
                Kind::Active => Some("active"),
                Kind::Committed => Some("committed"),
                Kind::View => Some("view"),
                Kind::Unknown => None,
            };
        }
        [labels, name @ ..] if labels == "labels" => record.labels.get(&name.join("."))?,
        _ => return None,
    };
    Some(text.as_str())
}

struct Scanner<'a> {
    text: &'a str,
    at: usize,
}

impl Scanner<'_> {
    fn rest(&self) -> &str {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn problem(&self, problem: &'static str) -> FilterError {
        FilterError {
            filter: self.text.chars().take(200).collect(),
            at: self.at,
            problem,
        }
    }

    fn selector(&mut self) -> Result<Selector, FilterError> {
        let mut field = vec![self.word(is_name)?];
        while self.rest().starts_with('.') {
            self.at += 1;
            field.push(self.word(is_name)?);
        }
        let operator = self.rest().get(..2).unwrap_or_default();
        let test: fn(String) -> Test = match operator {
            "==" => Test::Equal,
            "!=" => Test::NotEqual,
            "~=" => return Err(self.problem("regular expressions are not supported")),
            _ => {
                return Ok(Selector {
                    field,
                    test: Test::Present,
                });
            }
        };
        self.at += 2;
        let test = test(self.word(|c| c != ',')?);
        Ok(Selector { field, test })
    }

    /// A quoted text, or the characters that `belongs` accepts.
    fn word(&mut self, belongs: impl Fn(char) -> bool) -> Result<String, FilterError> {
        if self.rest().starts_with('"') {
            return self.quoted();
        }
        let word: String = self.rest().chars().take_while(|c| belongs(*c)).collect();
        if word.is_empty() {
            return Err(self.problem("a name or a value is expected"));
        }
        self.at += word.len();
        Ok(word)
    }

    /// A text as Go's `%q` writes it.
    fn quoted(&mut self) -> Result<String, FilterError> {
        let mut value = String::new();
        let mut characters = self.rest().char_indices().skip(1);
        while let Some((at, character)) = characters.next() {
            match character {
                '"' => {
                    self.at += at + 1;
                    return Ok(value);
                }
                '\\' => match characters.next() {
                    Some((_, escaped @ ('"' | '\\'))) => value.push(escaped),
                    _ => return Err(self.problem("an escape other than \\\" and \\\\")),
                },
                other => value.push(other),
            }
        }
        Err(self.problem("a quote that does not end"))
    }
}

/// The characters of an unquoted field.
fn is_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | '-' | '/')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record {
            name: "k8s.io/7/sha256:ab".into(),
            parent: "k8s.io/6/sha256:cd".into(),
            labels: [
                ("containerd.io/snapshot.ref".to_owned(), "sha256:ab".to_owned()),
                ("plain".to_owned(), "yes".to_owned()),
            ]
            .into(),
            ..Record::for_test()
        }
    }

    #[test]
    fn what_containerd_asks_is_understood() {
        let holds = |text: &str| Filter::parse(text).unwrap().holds(&record());
        assert!(holds(""));
        assert!(holds(
            r#"labels."containerd.io/snapshot.ref"==sha256:ab,parent=="k8s.io/6/sha256:cd""#
        ));
        assert!(!holds(
            r#"labels."containerd.io/snapshot.ref"==sha256:xx,parent=="k8s.io/6/sha256:cd""#
        ));
        assert!(holds("labels.plain"));
        assert!(holds("labels.plain!=no,kind==committed"));
        assert!(!holds("labels.other"));
        assert!(holds("labels.other!=1"));
        assert!(!holds("nothing==1"));
    }

    #[test]
    fn what_is_no_filter_is_refused() {
        for text in [
            ",",
            "name==",
            "name==\"x",
            "name~=x",
            "name==a,",
            "==x",
            "name==\"a\\n\"",
            "name=x",
        ] {
            assert!(Filter::parse(text).is_err(), "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics(text in ".{0,80}") {
            let _ = Filter::parse(&text);
        }
    }
}
