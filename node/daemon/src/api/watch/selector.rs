//! Selectors of sandboxes and of stored snapshots, by labels and by fields.
//!
//! Invariant: a selector is bounded however long its text ([`MAX_REQUIREMENTS`], [`MAX_VALUES`]), and every valid label can be selected.

use std::collections::{BTreeMap, BTreeSet};

use thaw_protocol::api::{Sandbox, Snapshot};

use crate::api::scope::Scope;

/// Most requirements of one selector.
pub const MAX_REQUIREMENTS: usize = 64;
/// Most values of one `in` or `notin`.
pub const MAX_VALUES: usize = 256;
/// Most labels of one sandbox.
pub const MAX_LABELS: usize = 64;
/// Longest name or value of a label, bytes.
const MAX_NAME: usize = 63;
/// Longest prefix of a label's name, bytes.
const MAX_PREFIX: usize = 253;

/// Why a selector or a label was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    #[error(
        "{0:?} is no label name: [prefix/]name, at most 63 of A-Z a-z 0-9 - _ . beginning and ending with a letter or digit"
    )]
    Key(String),
    #[error(
        "{0:?} is no label value: at most 63 of A-Z a-z 0-9 - _ . beginning and ending with a letter or digit"
    )]
    Value(String),
    #[error("{0:?} is no requirement: name, !name, name=value, name!=value, name in (a,b), name notin (a,b)")]
    Requirement(String),
    #[error("{0:?} is no field requirement: name, state, image or tenant, then = or != and a value")]
    Field(String),
    #[error("more than {0} {1}")]
    TooMany(usize, &'static str),
}

/// A requirement on a label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Requirement {
    /// The label exists, with one of these values.
    In(String, BTreeSet<String>),
    /// The label does not exist, or has none of these values.
    NotIn(String, BTreeSet<String>),
    Exists(String),
    Absent(String),
}

/// A field that a selector can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    Name,
    State,
    Image,
    Tenant,
}

/// One field is, or is not, a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldRequirement {
    pub field: Field,
    pub equal: bool,
    pub value: String,
}

/// A sandbox or snapshot matches if all requirements hold and it is in the caller's scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    pub scope: Scope,
    pub labels: Vec<Requirement>,
    pub fields: Vec<FieldRequirement>,
}

impl Selector {
    /// Parses a `labelSelector` and a `fieldSelector`, within a scope. Empty ones match all of the scope.
    pub fn parse(scope: Scope, labels: &str, fields: &str) -> Result<Selector, SelectorError> {
        Ok(Selector {
            scope,
            labels: parts(labels)?
                .into_iter()
                .map(requirement)
                .collect::<Result<_, _>>()?,
            fields: field_requirements(fields)?,
        })
    }

    /// Whether a stored snapshot matches.
    pub fn wants_snapshot(&self, snapshot: &Snapshot) -> bool {
        let image = snapshot.manifest.as_ref().map(|manifest| manifest.image.as_str());
        let field = |field: Field| match field {
            Field::Name => snapshot.name.as_deref(),
            Field::State => None,
            Field::Image => image,
            Field::Tenant => snapshot.tenant.as_deref(),
        };
        self.scope.reaches_tenant(snapshot.tenant.as_deref())
            && self.labels.iter().all(|r| r.holds(&snapshot.labels))
            && self
                .fields
                .iter()
                .all(|r| r.is(field(r.field).unwrap_or_default()))
    }

    /// Whether it selects by state.
    pub fn has_state(&self) -> bool {
        self.fields.iter().any(|r| r.field == Field::State)
    }

    /// Whether a sandbox matches.
    pub fn wants(&self, sandbox: &Sandbox) -> bool {
        self.scope.reaches(sandbox)
            && self.labels.iter().all(|r| r.holds(&sandbox.labels))
            && self.fields.iter().all(|r| r.holds(sandbox))
    }
}

impl Requirement {
    fn holds(&self, labels: &BTreeMap<String, String>) -> bool {
        match self {
            Requirement::In(key, values) => labels.get(key).is_some_and(|v| values.contains(v)),
            Requirement::NotIn(key, values) => !labels.get(key).is_some_and(|v| values.contains(v)),
            Requirement::Exists(key) => labels.contains_key(key),
            Requirement::Absent(key) => !labels.contains_key(key),
        }
    }
}

impl FieldRequirement {
    fn holds(&self, sandbox: &Sandbox) -> bool {
        let is = match self.field {
            Field::Name => sandbox.name.as_deref().unwrap_or_default(),
            Field::State => &sandbox.state,
            Field::Image => &sandbox.image,
            Field::Tenant => sandbox.tenant.as_deref().unwrap_or_default(),
        };
        self.is(is)
    }

    fn is(&self, value: &str) -> bool {
        (value == self.value) == self.equal
    }
}

/// Fails if a label could not be selected.
pub fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), SelectorError> {
    if labels.len() > MAX_LABELS {
        return Err(SelectorError::TooMany(MAX_LABELS, "labels"));
    }
    for (name, label) in labels {
        key(name)?;
        value(label)?;
    }
    Ok(())
}

/// Whether it begins and ends with a letter or digit and has only valid characters between.
fn is_name(text: &str) -> bool {
    let plain = |c: u8| c.is_ascii_alphanumeric();
    let bytes = text.as_bytes();
    matches!((bytes.first(), bytes.last()), (Some(&a), Some(&z)) if plain(a) && plain(z))
        && bytes.iter().all(|&c| plain(c) || b"-_.".contains(&c))
}

fn key(text: &str) -> Result<String, SelectorError> {
    let (prefix, name) = match text.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, text),
    };
    let prefix_is_good = prefix.is_none_or(|p| p.len() <= MAX_PREFIX && is_name(p) && !p.contains('_'));
    match prefix_is_good && name.len() <= MAX_NAME && is_name(name) {
        true => Ok(text.to_owned()),
        false => Err(SelectorError::Key(text.to_owned())),
    }
}

fn value(text: &str) -> Result<String, SelectorError> {
    match text.is_empty() || (text.len() <= MAX_NAME && is_name(text)) {
        true => Ok(text.to_owned()),
        false => Err(SelectorError::Value(text.to_owned())),
    }
}

/// Split at commas outside parentheses.
fn parts(text: &str) -> Result<Vec<&str>, SelectorError> {
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    let mut inside = false;
    let parts: Vec<&str> = text
        .split(|c| {
            inside = match c {
                '(' => true,
                ')' => false,
                _ => inside,
            };
            c == ',' && !inside
        })
        .map(str::trim)
        .take(MAX_REQUIREMENTS + 1)
        .collect();
    match parts.len() > MAX_REQUIREMENTS {
        true => Err(SelectorError::TooMany(MAX_REQUIREMENTS, "requirements")),
        false => Ok(parts),
    }
}

fn requirement(text: &str) -> Result<Requirement, SelectorError> {
    if let Some((name, values)) = text.split_once('(') {
        return set_requirement(text, name, values);
    }
    if let Some((name, label)) = text.split_once("!=") {
        return Ok(Requirement::NotIn(
            key(name.trim())?,
            [value(label.trim())?].into(),
        ));
    }
    if let Some((name, label)) = text.split_once("==").or_else(|| text.split_once('=')) {
        return Ok(Requirement::In(key(name.trim())?, [value(label.trim())?].into()));
    }
    match text.strip_prefix('!') {
        Some(name) => Ok(Requirement::Absent(key(name.trim())?)),
        None => Ok(Requirement::Exists(key(text)?)),
    }
}

/// `name in (a,b` and the closing parenthesis.
fn set_requirement(whole: &str, name: &str, values: &str) -> Result<Requirement, SelectorError> {
    let odd = || SelectorError::Requirement(whole.to_owned());
    let values = values.strip_suffix(')').ok_or_else(odd)?;
    let mut words = name.split_whitespace();
    let (Some(name), Some(operator), None) = (words.next(), words.next(), words.next()) else {
        return Err(odd());
    };
    let set = values.split(',').take(MAX_VALUES + 1).map(|v| value(v.trim()));
    let set: BTreeSet<String> = set.collect::<Result<_, _>>()?;
    if set.len() > MAX_VALUES {
        return Err(SelectorError::TooMany(MAX_VALUES, "values"));
    }
    match operator {
        "in" => Ok(Requirement::In(key(name)?, set)),
        "notin" => Ok(Requirement::NotIn(key(name)?, set)),
        _ => Err(odd()),
    }
}

/// `field=value,field!=value`; in a value `\` takes the next character as it is.
fn field_requirements(text: &str) -> Result<Vec<FieldRequirement>, SelectorError> {
    let mut requirements = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        if requirements.len() == MAX_REQUIREMENTS {
            return Err(SelectorError::TooMany(MAX_REQUIREMENTS, "requirements"));
        }
        let odd = || SelectorError::Field(rest.to_owned());
        let at = rest.find(['=', '!']).ok_or_else(odd)?;
        let field = match rest[..at].trim() {
            "name" => Field::Name,
            "state" => Field::State,
            "image" => Field::Image,
            "tenant" => Field::Tenant,
            _ => return Err(odd()),
        };
        let operators = [("!=", false), ("==", true), ("=", true)];
        let (after, equal) = operators
            .into_iter()
            .find_map(|(operator, equal)| rest[at..].strip_prefix(operator).map(|after| (after, equal)))
            .ok_or_else(odd)?;
        let (value, next) = unescape(after).ok_or_else(odd)?;
        requirements.push(FieldRequirement { field, equal, value });
        rest = next;
    }
    Ok(requirements)
}

/// A value up to its comma, and what comes after that.
fn unescape(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, c)) = characters.next() {
        match c {
            ',' => return Some((value, &text[at + 1..])),
            '\\' => value.push(characters.next()?.1),
            c => value.push(c),
        }
    }
    Some((value, ""))
}

#[cfg(test)]
#[path = "selector_test.rs"]
mod tests;
