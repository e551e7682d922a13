//! `thaw events --filter`.

use std::str::FromStr;

use thaw_protocol::api::{Sandbox, SandboxAction};

const KEYS: &str = "event, container, image, label, type";

/// A condition on the events that are shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filter {
    Event(String),
    /// The name, or the beginning of the id.
    Container(String),
    /// The image, as it was named, or its name without a tag.
    Image(String),
    /// There is this label, with this value if one is given.
    Label(String, Option<String>),
    /// Every event is of a container.
    Type,
}

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Filter, String> {
        let keys = || format!("KEY=VALUE, where KEY is one of {KEYS}");
        let (key, value) = text.split_once('=').ok_or_else(keys)?;
        let actions = SandboxAction::ALL.map(SandboxAction::name);
        Ok(match key {
            "event" if actions.contains(&value) => Filter::Event(value.into()),
            "event" => return Err(format!("event is one of {}", actions.join(", "))),
            "container" => Filter::Container(value.into()),
            "image" => Filter::Image(value.into()),
            "label" => match value.split_once('=') {
                Some((label, value)) => Filter::Label(label.into(), Some(value.into())),
                None => Filter::Label(value.into(), None),
            },
            "type" if value == "container" => Filter::Type,
            "type" => return Err("type is container: there are no other events".into()),
            _ => return Err(keys()),
        })
    }
}

impl Filter {
    fn admits(&self, action: &str, sandbox: &Sandbox) -> bool {
        match self {
            Filter::Event(wanted) => wanted == action,
            Filter::Container(wanted) => {
                sandbox.name.as_ref() == Some(wanted) || sandbox.id.starts_with(wanted.as_str())
            }
            Filter::Image(image) => {
                let rest = sandbox.image.strip_prefix(image.as_str());
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with([':', '@']))
            }
            Filter::Label(key, value) => {
                let label = sandbox.labels.get(key);
                label.is_some_and(|has| value.as_ref().is_none_or(|value| value == has))
            }
            Filter::Type => true,
        }
    }
}

/// Whether the filters admit an event: for each key, one of its filters.
pub(super) fn admit(filters: &[Filter], action: &str, sandbox: &Sandbox) -> bool {
    let same = |a: &Filter, b: &Filter| std::mem::discriminant(a) == std::mem::discriminant(b);
    filters.iter().all(|filter| {
        let mut alternatives = filters.iter().filter(|other| same(filter, other));
        alternatives.any(|filter| filter.admits(action, sandbox))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_of_a_key_are_alternatives_and_keys_conditions() {
        let sandbox = Sandbox {
            id: "abc".into(),
            name: Some("web".into()),
            image: "app:1".into(),
            ..Sandbox::default()
        };
        let admitted = |filters: &[&str]| {
            let filters: Vec<Filter> = filters.iter().map(|f| f.parse().unwrap()).collect();
            admit(&filters, "die", &sandbox)
        };
        assert!(admitted(&[]) && admitted(&["event=start", "event=die", "container=ab"]));
        assert!(admitted(&["type=container", "image=app", "container=web"]));
        assert!(!admitted(&["event=start"]) && !admitted(&["event=die", "label=x"]));
    }

    #[test]
    fn wrong_filters_list_what_there_is() {
        let error = |text: &str| text.parse::<Filter>().unwrap_err();
        assert!(error("event=nope").contains("destroy"));
        assert!(error("volume=x").contains("container") && error("event").contains("KEY=VALUE"));
        assert!(error("type=image").contains("container"));
    }
}
