//! `--format`: `json`, or a subset of Go's templates as docker's commands take them: `{{.Field}}`, `{{.Field.Field}}`, `{{json .Field}}`
//! and text, after `table` with headings and aligned columns.
//!
//! Names of fields match without regard to case and underscores. Everything else that Go's templates have is refused by name.

use std::str::FromStr;

use serde_json::Value;
use thaw_sandbox::closest::closest;
use thaw_sandbox::error::{Error, ErrorKind};

use super::table::{Table, printable};

/// What templates may contain, for errors and help.
pub(super) const SYNTAX: &str = "use {{.Field}}, {{.Field.Field}} or {{json .Field}}";

/// A parsed `--format`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Format {
    /// Each value as JSON on a line of its own.
    Json,
    /// The command's own table.
    Table,
    Template(Template),
}

/// A template: text, and fields of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    /// With headings, and columns where the template has tabs.
    table: bool,
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    /// The field at a path, as JSON or as text. An empty path is the whole value.
    Field {
        path: Vec<String>,
        json: bool,
    },
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Format, String> {
        let (table, template) = match text.trim() {
            "json" => return Ok(Format::Json),
            "table" => return Ok(Format::Table),
            trimmed => match trimmed.strip_prefix("table ") {
                Some(rest) => (true, rest.trim_start()),
                None => (false, text),
            },
        };
        let parts = parse(&template.replace("\\t", "\t").replace("\\n", "\n"))?;
        if !parts.iter().any(|part| matches!(part, Part::Field { .. })) {
            return Err(format!("`json`, or a template: {SYNTAX}"));
        }
        Ok(Format::Template(Template { table, parts }))
    }
}

fn parse(mut text: &str) -> Result<Vec<Part>, String> {
    let mut parts = Vec::new();
    while let Some((before, rest)) = text.split_once("{{") {
        let (action, after) = rest.split_once("}}").ok_or("`{{` without `}}`")?;
        if !before.is_empty() {
            parts.push(Part::Text(before.into()));
        }
        parts.push(parse_action(action.trim())?);
        text = after;
    }
    if !text.is_empty() {
        parts.push(Part::Text(text.into()));
    }
    Ok(parts)
}

fn parse_action(action: &str) -> Result<Part, String> {
    let words: Vec<&str> = action.split_whitespace().collect();
    let (json, path) = match words[..] {
        [path] if path.starts_with('.') => (false, path),
        ["json", path] if path.starts_with('.') => (true, path),
        ["json"] => return Err(format!("{{{{json}}}} needs a field; {SYNTAX}")),
        [] => return Err(format!("{{{{}}}} is empty; {SYNTAX}")),
        _ => return Err(format!("{{{{{action}}}}} is not supported; {SYNTAX}")),
    };
    let path = match path {
        "." => Vec::new(),
        path => path[1..].split('.').map(str::to_owned).collect(),
    };
    match path.iter().any(String::is_empty) {
        true => Err(format!("{{{{{action}}}}} is no field; {SYNTAX}")),
        false => Ok(Part::Field { path, json }),
    }
}

impl Format {
    /// Fails if the template names a field that no value has, so that the error does not depend on whether there are values.
    pub(super) fn check(&self, fields: &[&str]) -> Result<(), Error> {
        let Format::Template(template) = self else {
            return Ok(());
        };
        let firsts = template.paths().filter_map(|path| path.first());
        let mut unknown = firsts.filter(|first| !fields.iter().any(|field| same(field, first)));
        match unknown.next() {
            Some(first) => Err(no_field(first, fields.iter().copied())),
            None => Ok(()),
        }
    }

    /// Fails if it needs all values at once: those of a stream come one by one.
    pub(super) fn check_stream(&self) -> Result<(), Error> {
        match self {
            Format::Table | Format::Template(Template { table: true, .. }) => {
                let what = "--format: a table cannot be made of what has no end";
                Err(Error::new(ErrorKind::Runtime, what).remedy("leave out `table`"))
            }
            Format::Json | Format::Template(_) => Ok(()),
        }
    }

    /// One value as a line.
    pub(super) fn line(&self, value: &Value) -> Result<String, Error> {
        match self {
            Format::Json | Format::Table => Ok(value.to_string()),
            Format::Template(template) => template.text(value),
        }
    }

    /// Prints the values, or with `table` the command's own table.
    pub(super) fn print(&self, values: &[Value], table: impl FnOnce()) -> Result<(), Error> {
        match self {
            Format::Json => values.iter().for_each(|value| super::print(&value.to_string())),
            Format::Table => table(),
            Format::Template(template) if template.table => template.table(values)?.print(),
            Format::Template(template) => {
                for value in values {
                    super::print(&template.text(value)?);
                }
            }
        }
        Ok(())
    }
}

impl Template {
    fn paths(&self) -> impl Iterator<Item = &Vec<String>> {
        self.parts.iter().filter_map(|part| match part {
            Part::Text(_) => None,
            Part::Field { path, .. } => Some(path),
        })
    }

    fn text(&self, value: &Value) -> Result<String, Error> {
        let text = self.parts.iter().map(|part| match part {
            Part::Text(text) => Ok(text.clone()),
            Part::Field { path, json: true } => Ok(find(value, path)?.to_string()),
            Part::Field { path, json: false } => Ok(plain(find(value, path)?)),
        });
        text.collect()
    }

    fn table(&self, values: &[Value]) -> Result<Table, Error> {
        let heading = self.parts.iter().map(|part| match part {
            Part::Text(text) => text.clone(),
            Part::Field { path, .. } => path.join(".").to_uppercase(),
        });
        let heading: String = heading.collect();
        let mut table = Table::new(&heading.split('\t').collect::<Vec<_>>());
        for value in values {
            let row = self.text(value)?;
            table.row(row.split('\t').map(str::to_owned).collect::<Vec<_>>());
        }
        Ok(table)
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => printable(text),
        other => other.to_string(),
    }
}

/// The field at a path. A field of `null` is `null`.
fn find<'a>(value: &'a Value, path: &[String]) -> Result<&'a Value, Error> {
    path.iter().try_fold(value, |value, name| match value {
        Value::Null => Ok(value),
        Value::Object(fields) => {
            let found = fields.iter().find(|(field, _)| same(field, name));
            let found = found.map(|(_, value)| value);
            found.ok_or_else(|| no_field(name, fields.keys().map(String::as_str)))
        }
        _ => Err(no_field(name, std::iter::empty())),
    })
}

/// Whether two names are equal but for case and underscores.
fn same(a: &str, b: &str) -> bool {
    let letters = |name: &str| name.replace('_', "").to_lowercase();
    letters(a) == letters(b)
}

fn no_field<'a>(wanted: &str, fields: impl Iterator<Item = &'a str>) -> Error {
    let fields: Vec<String> = fields.map(|field| format!(".{field}")).collect();
    let closest = closest(&format!(".{wanted}"), fields.iter().map(String::as_str));
    let what = format!("--format: there is no field .{wanted} here{closest}");
    let error = Error::new(ErrorKind::Runtime, what);
    match fields.is_empty() {
        true => error.remedy("the value has no fields"),
        false => error.remedy(format!("the fields are {}", fields.join(" "))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn text(template: &str, value: &Value) -> String {
        let Ok(Format::Template(template)) = template.parse() else {
            panic!("{template}");
        };
        match template.text(value) {
            Ok(text) => text,
            Err(e) => e.to_string(),
        }
    }

    #[test]
    fn fields_match_without_case_and_underscores() {
        let value = json!({"id": "a", "memory_mib": 512, "none": null, "network": {"address": "x\u{1b}", "ports": [1]}});
        let cases = [
            ("{{.ID}} {{ .MemoryMiB }}", "a 512"),
            ("{{.Network.Address}}{{.none}}{{.None.Deeper}}", "x?"),
            ("{{json .Network.Ports}}\\t{{.network.ports}}", "[1]\t[1]"),
            ("}}{{json .ID}}{", "}}\"a\"{"),
        ];
        for (template, expected) in cases {
            assert_eq!(text(template, &value), expected, "{template}");
        }
        assert_eq!(text("{{json .}}", &value), value.to_string());
    }

    #[test]
    fn an_unknown_field_lists_the_known_ones() {
        let error = text("{{.Foo}}", &json!({"id": 1, "name": 2}));
        assert!(error.contains(".Foo") && error.contains(".id .name"), "{error}");
        let near = text("{{.nmae}}", &json!({"id": 1, "name": 2}));
        assert!(near.contains("closest is .name"), "{near}");
        let deeper = text("{{.id.x}}", &json!({"id": 1}));
        assert!(deeper.contains("no field .x"), "{deeper}");
        let format: Format = "{{.Foo}}".parse().unwrap();
        let error = format.check(&["ID", "Name"]).unwrap_err().to_string();
        assert!(error.contains(".ID .Name"), "{error}");
        "{{.n_ame.sub}}{{json .}}"
            .parse::<Format>()
            .unwrap()
            .check(&["Name"])
            .unwrap();
    }

    #[test]
    fn what_else_templates_have_is_refused_by_name() {
        for (template, named) in [
            ("{{range .Ports}}x{{end}}", "{{range .Ports}}"),
            ("{{if .x}}", "{{if .x}}"),
            ("{{upper .x}}", "{{upper .x}}"),
            ("{{- .x}}", "{{- .x}}"),
            ("{{.x | json}}", "{{.x | json}}"),
            ("{{json}}", "{{json}}"),
            ("{{..}}", "{{..}}"),
            ("{{}}", "{{}}"),
            ("{{.x", "without"),
            ("plain", "a template"),
            ("", "a template"),
        ] {
            let error = template.parse::<Format>().unwrap_err();
            assert!(error.contains(named), "{template}: {error}");
        }
    }

    #[test]
    fn a_table_has_headings_and_columns() {
        let Ok(Format::Template(template)) = "table {{.Id}}\\t{{.Name}}".parse() else {
            panic!();
        };
        let table = template.table(&[json!({"id": "long one", "name": "b"})]).unwrap();
        assert_eq!(table.lines(None), ["ID        NAME", "long one  b"]);
        assert_eq!("table".parse(), Ok(Format::Table));
        assert_eq!(" json ".parse(), Ok(Format::Json));
    }
}
