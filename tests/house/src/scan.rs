//! What one Rust file has: functions, modules, paths to other modules, and the lines that only tests compile. It reads tokens, not
//! syntax trees, so code inside macros such as `proptest!` counts as well.

use std::ops::RangeInclusive;
use std::str::FromStr;

use proc_macro2::{Delimiter, Group, Spacing, Span, TokenStream, TokenTree};

#[derive(Debug, Default)]
pub struct Scan {
    pub functions: Vec<Function>,
    pub modules: Vec<ModuleItem>,
    pub paths: Vec<PathUse>,
    /// Lines of items under `#[cfg(test)]`, a `testing` feature or `cfg(fuzzing)`, from 1.
    pub test_lines: Vec<RangeInclusive<usize>>,
}

#[derive(Debug)]
pub struct Function {
    pub name: String,
    /// Of `fn`, from 1.
    pub line: usize,
    /// From `fn` to the closing brace.
    pub lines: usize,
    /// It has `#[test]`, or an attribute whose last word is `test`.
    pub is_test: bool,
}

/// `mod name;`
#[derive(Debug)]
pub struct ModuleItem {
    /// The modules of this file around it, then its own name.
    pub within: Vec<String>,
    /// Of `#[path]`.
    pub path: Option<String>,
    pub is_test: bool,
}

/// A path that leads to another module: every path of a `use`, and those that start with `crate`, `self` or `super`.
#[derive(Clone, Debug)]
pub struct PathUse {
    /// The modules of this file around it.
    pub within: Vec<String>,
    pub segments: Vec<String>,
    /// The name that a `use` gives it.
    pub alias: Option<String>,
    pub is_test: bool,
}

/// Fails if the text is not Rust tokens.
pub fn scan(text: &str) -> Result<Scan, String> {
    let tokens = TokenStream::from_str(text).map_err(|e| e.to_string())?;
    let mut scanner = Scanner::default();
    scanner.walk(&trees(tokens), &[]);
    Ok(scanner.found)
}

#[derive(Default)]
struct Scanner {
    found: Scan,
    within: Vec<String>,
    in_test: bool,
}

impl Scanner {
    /// `attributes` are those of the first token.
    fn walk(&mut self, tokens: &[TokenTree], attributes: &[Group]) {
        let mut attributes = attributes.to_vec();
        let mut first_attribute = 0;
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            if let Some(group) = attribute(&tokens[at..]) {
                if attributes.is_empty() {
                    first_attribute = at;
                }
                attributes.push(group.clone());
                at += 2;
                continue;
            }
            if !self.in_test && attributes.iter().any(is_test_only) {
                let end = item_end(tokens, at);
                let lines = line(tokens[first_attribute].span())..=end_line(&tokens[end]);
                self.found.test_lines.push(lines);
                self.in_test = true;
                self.walk(&tokens[at..=end], &attributes);
                self.in_test = false;
                attributes.clear();
                at = end + 1;
                continue;
            }
            at += self.take(&tokens[at..], &attributes);
            if ends_item(token) {
                attributes.clear();
            }
        }
    }

    /// Takes what starts with the first token; returns how many tokens it was.
    fn take(&mut self, tokens: &[TokenTree], attributes: &[Group]) -> usize {
        match (&tokens[0], tokens.get(1), tokens.get(2)) {
            (TokenTree::Ident(word), Some(TokenTree::Ident(name)), _) if word == "fn" => {
                let end = item_end(tokens, 0);
                let first = line(word.span());
                self.found.functions.push(Function {
                    name: name.to_string(),
                    line: first,
                    lines: end_line(&tokens[end]) - first + 1,
                    is_test: attributes.iter().any(is_test_attribute),
                });
                2
            }
            (TokenTree::Ident(word), Some(TokenTree::Ident(name)), Some(next)) if word == "mod" => {
                self.take_module(&name.to_string(), next, attributes);
                3
            }
            (TokenTree::Ident(word), ..) if word == "use" => {
                let end = tokens
                    .iter()
                    .position(|token| is_punct(token, ';'))
                    .unwrap_or(tokens.len());
                self.take_use(&tokens[1..end], &[]);
                end
            }
            (TokenTree::Ident(word), ..) if ["crate", "self", "super"].iter().any(|start| word == start) => {
                let (segments, taken) = plain_path(tokens);
                if segments.len() > 1 {
                    self.push_path(segments, None);
                }
                taken
            }
            (TokenTree::Group(group), ..) => {
                self.walk(&trees(group.stream()), &[]);
                1
            }
            _ => 1,
        }
    }

    fn take_module(&mut self, name: &str, next: &TokenTree, attributes: &[Group]) {
        self.within.push(name.to_owned());
        match next {
            TokenTree::Group(group) => self.walk(&trees(group.stream()), &[]),
            _ => self.found.modules.push(ModuleItem {
                within: self.within.clone(),
                path: attributes.iter().find_map(path_attribute),
                is_test: self.in_test,
            }),
        }
        self.within.pop();
    }

    /// A tree of a `use`, behind these segments.
    fn take_use(&mut self, tokens: &[TokenTree], before: &[String]) {
        let mut segments = before.to_vec();
        let mut alias = None;
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            match token {
                TokenTree::Ident(word) if word == "as" => {
                    alias = tokens.get(at + 1).map(ToString::to_string);
                    break;
                }
                TokenTree::Ident(word) if word == "self" && !segments.is_empty() => {}
                TokenTree::Ident(word) => segments.push(word.to_string()),
                TokenTree::Group(group) => {
                    let trees = trees(group.stream());
                    for tree in trees
                        .split(|token| is_punct(token, ','))
                        .filter(|tree| !tree.is_empty())
                    {
                        self.take_use(tree, &segments);
                    }
                    return;
                }
                _ => {}
            }
            at += 1;
        }
        let alias = alias.or_else(|| segments.last().cloned());
        self.push_path(segments, alias);
    }

    fn push_path(&mut self, segments: Vec<String>, alias: Option<String>) {
        self.found.paths.push(PathUse {
            within: self.within.clone(),
            segments,
            alias,
            is_test: self.in_test,
        });
    }
}

fn trees(stream: TokenStream) -> Vec<TokenTree> {
    stream.into_iter().collect()
}

fn line(span: Span) -> usize {
    span.start().line
}

fn end_line(token: &TokenTree) -> usize {
    match token {
        TokenTree::Group(group) => group.span_close().end().line,
        token => token.span().end().line,
    }
}

fn is_punct(token: &TokenTree, wanted: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == wanted)
}

fn is_brace(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace)
}

fn ends_item(token: &TokenTree) -> bool {
    is_brace(token) || is_punct(token, ';') || is_punct(token, ',')
}

/// The group of the attribute that starts here. A file's own attributes (`#![…]`) are none of an item's.
fn attribute(tokens: &[TokenTree]) -> Option<&Group> {
    match tokens {
        [hash, TokenTree::Group(group), ..]
            if is_punct(hash, '#') && group.delimiter() == Delimiter::Bracket =>
        {
            Some(group)
        }
        _ => None,
    }
}

/// The last token of the item that starts at `from`: its block or its semicolon; of a field or a variant, its comma.
fn item_end(tokens: &[TokenTree], from: usize) -> usize {
    const ITEMS: [&str; 15] = [
        "pub",
        "fn",
        "mod",
        "use",
        "impl",
        "struct",
        "enum",
        "const",
        "static",
        "type",
        "trait",
        "async",
        "unsafe",
        "extern",
        "macro_rules",
    ];
    let is_item = matches!(&tokens[from], TokenTree::Ident(word) if ITEMS.iter().any(|item| word == item));
    let is_end =
        |token: &TokenTree| is_brace(token) || is_punct(token, ';') || (!is_item && is_punct(token, ','));
    let length = tokens[from..].iter().position(is_end);
    length.map_or(tokens.len() - 1, |length| from + length)
}

/// The segments of a path in an expression or a type, and how many tokens they are.
fn plain_path(tokens: &[TokenTree]) -> (Vec<String>, usize) {
    let mut segments = vec![tokens[0].to_string()];
    let mut at = 1;
    while let Some([first, second, TokenTree::Ident(word)]) = tokens.get(at..at + 3) {
        let is_joint = matches!(first, TokenTree::Punct(punct) if punct.spacing() == Spacing::Joint);
        if !(is_joint && is_punct(first, ':') && is_punct(second, ':')) {
            break;
        }
        segments.push(word.to_string());
        at += 3;
    }
    (segments, at)
}

/// `#[test]`, `#[tokio::test(…)]`
fn is_test_attribute(attribute: &Group) -> bool {
    let words = trees(attribute.stream());
    let path = words
        .iter()
        .take_while(|token| !matches!(token, TokenTree::Group(_)) && !is_punct(token, '='));
    path.last().is_some_and(|last| last.to_string() == "test")
}

/// A `cfg` that no release satisfies.
fn is_test_only(attribute: &Group) -> bool {
    match &trees(attribute.stream())[..] {
        [TokenTree::Ident(cfg), TokenTree::Group(condition)] if cfg == "cfg" => {
            names_tests(&trees(condition.stream()))
        }
        _ => false,
    }
}

fn names_tests(condition: &[TokenTree]) -> bool {
    let mut negated = false;
    condition.iter().any(|token| match token {
        TokenTree::Ident(word) => {
            negated = word == "not";
            word == "test" || word == "fuzzing"
        }
        TokenTree::Literal(literal) => literal.to_string().starts_with("\"test"),
        TokenTree::Group(group) => !negated && names_tests(&trees(group.stream())),
        TokenTree::Punct(_) => false,
    })
}

/// The value of `#[path = "…"]`.
fn path_attribute(attribute: &Group) -> Option<String> {
    match &trees(attribute.stream())[..] {
        [TokenTree::Ident(path), _, TokenTree::Literal(value)] if path == "path" => {
            Some(value.to_string().trim_matches('"').to_owned())
        }
        _ => None,
    }
}

#[cfg(test)]
#[path = "scan_test.rs"]
mod tests;
