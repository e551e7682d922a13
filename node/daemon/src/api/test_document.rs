//! The OpenAPI document, for tests that send a request to every operation.

use axum::extract::Request;
use serde_json::{Map, Value, json};

use super::grant::Role;
use super::router::document;
use super::test_client::{JSON, ask};

/// An operation of the document.
pub struct Operation {
    pub method: String,
    pub path: String,
    pub name: String,
    pub least: Role,
    /// The required parameters of its query.
    pub query: String,
    /// The name of its JSON body's schema, if it takes one.
    pub body: Option<String>,
}

/// The document, with functions to search it.
pub struct Document(Value);

impl Document {
    pub fn read() -> Document {
        Document(serde_json::from_str(&document()).unwrap())
    }

    pub fn operations(&self) -> Vec<Operation> {
        let mut all = Vec::new();
        for (path, methods) in self.0["paths"].as_object().unwrap() {
            for (method, said) in methods.as_object().unwrap() {
                let name = said["operationId"].as_str().unwrap().to_owned();
                let roles: Vec<&Value> = said["security"]
                    .as_array()
                    .unwrap_or_else(|| panic!("{name} says no role"))
                    .iter()
                    .flat_map(|way| way.as_object().unwrap().values())
                    .collect();
                assert_eq!(roles.len(), 2, "{name}: a token, a certificate");
                assert_eq!(roles[0], roles[1], "{name}");
                let least = roles[0][0].as_str().unwrap().parse().unwrap();
                let parameters = said["parameters"].as_array().into_iter().flatten();
                let query = parameters.filter(|p| p["in"] == "query" && p["required"] == true);
                let query = query.map(|p| {
                    let value = self.example(&p["schema"]);
                    format!("{}={}", p["name"].as_str().unwrap(), value.as_str().unwrap())
                });
                let body = &said["requestBody"]["content"]["application/json"]["schema"]["$ref"];
                all.push(Operation {
                    method: method.to_uppercase(),
                    path: path.clone(),
                    name,
                    least,
                    query: query.collect::<Vec<_>>().join("&"),
                    body: body.as_str().map(|r| r.rsplit('/').next().unwrap().to_owned()),
                });
            }
        }
        assert!(all.len() > 20, "{}", all.len());
        all
    }

    pub fn schema(&self, name: &str) -> &Value {
        let schema = &self.0["components"]["schemas"][name];
        assert!(schema.is_object(), "{name}");
        schema
    }

    /// The schema that a reference stands for, or the first alternative of a choice.
    pub fn resolved<'a>(&'a self, schema: &'a Value) -> &'a Value {
        let first = schema["oneOf"].as_array().or(schema["allOf"].as_array());
        match (schema["$ref"].as_str(), first) {
            (Some(reference), _) => self.resolved(self.schema(reference.rsplit('/').next().unwrap())),
            (None, Some(forms)) => {
                let is_null = |form: &&Value| form["type"] == "null";
                self.resolved(forms.iter().find(|form| !is_null(form)).unwrap())
            }
            (None, None) => schema,
        }
    }

    pub fn is_type(schema: &Value, wanted: &str) -> bool {
        let kind = &schema["type"];
        kind == wanted
            || kind
                .as_array()
                .is_some_and(|kinds| kinds.iter().any(|k| k == wanted))
    }

    /// The smallest value that a schema allows. Where there is a choice, not the default.
    pub fn example(&self, schema: &Value) -> Value {
        let schema = self.resolved(schema);
        if let Some(one) = schema["enum"].as_array() {
            return one.last().unwrap().clone();
        }
        let is = |wanted| Document::is_type(schema, wanted);
        if is("object") || schema["properties"].is_object() {
            let required = schema["required"].as_array().into_iter().flatten();
            let pairs = required.map(|name| {
                let name = name.as_str().unwrap();
                (name.to_owned(), self.example(&schema["properties"][name]))
            });
            return Value::Object(pairs.collect::<Map<_, _>>());
        }
        if is("array") {
            return json!([self.example(&schema["items"])]);
        }
        if is("integer") {
            return schema["minimum"].as_u64().unwrap_or(1).into();
        }
        if is("boolean") {
            return true.into();
        }
        let pattern = schema["pattern"].as_str().unwrap_or_default();
        match pattern
            .strip_prefix("^(")
            .and_then(|p| p.split(['|', ')']).next())
        {
            Some(first) => first.into(),
            None if pattern.starts_with("^/") => "/x".into(),
            None => "x".into(),
        }
    }

    /// The smallest body that an operation accepts.
    pub fn body(&self, operation: &Operation) -> String {
        match &operation.body {
            Some(name) => self.example(self.schema(name)).to_string(),
            None => String::new(),
        }
    }

    /// Every text field in a schema, by the names of the fields that lead to it.
    pub fn texts(&self, at: &str, schema: &Value, found: &mut Vec<String>) {
        let schema = self.resolved(schema);
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            self.texts(&format!("{at}.{name}"), property, found);
        }
        if Document::is_type(schema, "array") {
            return self.texts(at, &schema["items"], found);
        }
        if Document::is_type(schema, "string") && schema["enum"].is_null() {
            found.push(at.to_owned());
        }
    }

    /// The smallest body of a schema with this text at the field with these names.
    pub fn with(&self, schema: &Value, names: &[&str], text: &str) -> Value {
        let schema = self.resolved(schema);
        if Document::is_type(schema, "array") {
            return json!([self.with(&schema["items"], names, text)]);
        }
        let Some((first, rest)) = names.split_first() else {
            return text.into();
        };
        let mut whole = self.example(schema);
        whole[first] = self.with(&schema["properties"][first], rest, text);
        whole
    }
}

impl Operation {
    /// A request for this operation, with `subject` as the sandbox, image or template.
    pub fn request(&self, subject: &str, body: String) -> Request {
        let mut path = self.path.clone();
        if let Some((before, rest)) = self.path.split_once('{') {
            let (_, after) = rest.split_once('}').unwrap();
            path = format!("{before}{subject}{after}");
        }
        if !self.query.is_empty() {
            path = format!("{path}?{}", self.query);
        }
        ask(&self.method, &path, JSON, body)
    }

    pub fn is_of_a_sandbox(&self) -> bool {
        self.path.starts_with("/v1/sandboxes/{id}")
    }

    /// Whether the operation needs a connection of its own to reach the guest: `tcp_test` covers those.
    pub fn is_a_session(&self) -> bool {
        self.name == "openExecSession"
    }

    /// Whether the answer comes only when the container ends: `life_test` covers that.
    pub fn waits_for_an_end(&self) -> bool {
        self.name == "getContainerExit"
    }
}
