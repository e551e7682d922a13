//! Every service, method, message, field, number and type of the agent's API compared with the table of Kata
//! Containers 3.15.0, `kata-3.15.0.txt`: facts, one per line, taken only from Kata's publications.

use std::collections::BTreeSet;
use std::path::Path;

const TABLE: &str = include_str!("kata-3.15.0.txt");
/// The definitions that are Kata's.
const FILES: [&str; 5] = ["agent", "csi", "health", "oci", "types"];

/// The least number of a field that Kata does not have.
const OUR_OWN: u32 = 1000;

/// Words and signs of a definition, without comments.
struct Tokens(std::vec::IntoIter<String>);

impl Tokens {
    fn of(text: &str) -> Tokens {
        let mut tokens: Vec<String> = Vec::new();
        for line in text.lines() {
            let code = line.split("//").next().unwrap_or_default();
            let mut word = String::new();
            for c in code.chars().chain([' ']) {
                if c.is_alphanumeric() || matches!(c, '_' | '.' | '"' | '/') {
                    word.push(c);
                    continue;
                }
                if !word.is_empty() {
                    tokens.push(std::mem::take(&mut word));
                }
                if !c.is_whitespace() {
                    tokens.push(c.into());
                }
            }
        }
        Tokens(tokens.into_iter())
    }

    fn next(&mut self) -> String {
        self.0.next().expect("the definition ends in the middle")
    }

    fn until(&mut self, end: &str) -> Vec<String> {
        let mut read = Vec::new();
        loop {
            match self.next() {
                token if token == end => return read,
                token => read.push(token),
            }
        }
    }
}

/// The facts of a definition, as the table has them.
fn facts(text: &str) -> Vec<String> {
    let mut tokens = Tokens::of(text);
    let mut facts = Vec::new();
    let mut package = String::new();
    while let Some(token) = tokens.0.next() {
        match token.as_str() {
            "package" => package = tokens.until(";").concat(),
            "message" => message(&mut tokens, &package, &mut facts),
            "enum" => enumeration(&mut tokens, &package, &mut facts),
            "service" => {
                let name = tokens.until("{").concat();
                service(&mut tokens, &format!("{package}.{name}"), &mut facts);
            }
            _ => drop(tokens.until(";")),
        }
    }
    facts
}

fn message(tokens: &mut Tokens, within: &str, facts: &mut Vec<String>) {
    let name = format!("{within}.{}", tokens.until("{").concat());
    facts.push(format!("message {name}"));
    fields(tokens, &name, facts);
}

/// The facts of the fields of a message, or of an alternative in it.
fn fields(tokens: &mut Tokens, message_name: &str, facts: &mut Vec<String>) {
    loop {
        match tokens.next().as_str() {
            "}" => return,
            "enum" => enumeration(tokens, message_name, facts),
            "message" => message(tokens, message_name, facts),
            "oneof" => {
                tokens.until("{");
                fields(tokens, message_name, facts);
            }
            first => {
                let mut words = vec![first.to_owned()];
                words.extend(tokens.until("="));
                let name = words.pop().expect("a field has a name");
                let kind = match words.split_first() {
                    Some((map, of)) if map == "map" => format!("map{}", of.concat()),
                    _ => words.join(" "),
                };
                let number = tokens.until(";").remove(0);
                facts.push(format!("field {message_name}.{name} = {number} {kind}"));
            }
        }
    }
}

fn enumeration(tokens: &mut Tokens, within: &str, facts: &mut Vec<String>) {
    let name = format!("{within}.{}", tokens.until("{").concat());
    loop {
        match tokens.next().as_str() {
            "}" => return,
            value => {
                tokens.next();
                let number = tokens.until(";").remove(0);
                facts.push(format!("value {name}.{value} = {number}"));
            }
        }
    }
}

fn service(tokens: &mut Tokens, name: &str, facts: &mut Vec<String>) {
    while tokens.next() == "rpc" {
        let words = tokens.until(";");
        let [method, "(", request, ")", "returns", "(", response, ")"] =
            words.iter().map(String::as_str).collect::<Vec<_>>()[..]
        else {
            panic!("a method of {name}: {words:?}");
        };
        facts.push(format!("method {name}.{method} {request} {response}"));
    }
}

/// Whether a fact is about a field of Thaw's own. Their numbers begin where Kata has none, and a peer that
/// does not know them skips them.
fn is_our_own(fact: &str) -> bool {
    let number = fact
        .split_once(" = ")
        .and_then(|(_, rest)| rest.split(' ').next());
    number
        .and_then(|number| number.parse::<u32>().ok())
        .is_some_and(|number| number >= OUR_OWN)
}

#[test]
fn every_message_and_method_is_katas() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let ours: BTreeSet<String> = FILES
        .iter()
        .flat_map(|file| facts(&std::fs::read_to_string(directory.join(format!("{file}.proto"))).unwrap()))
        .collect();
    let facts = TABLE.lines().filter(|line| !line.starts_with('#'));
    let katas: BTreeSet<String> = facts.map(str::to_owned).collect();
    let lacks: Vec<_> = katas.difference(&ours).collect();
    let adds: Vec<_> = ours.difference(&katas).filter(|fact| !is_our_own(fact)).collect();
    assert!(
        lacks.is_empty() && adds.is_empty(),
        "lacks {lacks:#?}\nadds {adds:#?}"
    );
    assert!(katas.len() > 400, "the table is whole: {}", katas.len());
}

#[test]
fn a_definition_is_read_as_it_is_meant() {
    let text = "syntax = \"proto3\"; package p; import \"x/y.proto\";\n\
        message A { // not this: string b = 9;\n  repeated types.B bs = 2; map<string, uint64> m = 3;\n\
        oneof Choice { uint32 c = 4; }\n enum E { X = 0; } optional bool d = 5; }\n\
        service S { rpc Do(A) returns (google.protobuf.Empty); }";
    let read = facts(text);
    assert_eq!(
        read,
        [
            "message p.A",
            "field p.A.bs = 2 repeated types.B",
            "field p.A.m = 3 map<string,uint64>",
            "field p.A.c = 4 uint32",
            "value p.A.E.X = 0",
            "field p.A.d = 5 optional bool",
            "method p.S.Do A google.protobuf.Empty",
        ]
    );
}
