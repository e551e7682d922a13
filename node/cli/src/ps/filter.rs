//! `thaw ps --filter`.

use std::str::FromStr;

use thaw_protocol::api::{EXITED, FAILED, HealthStatus};
use thaw_sandbox::closest::closest;

use super::Row;

const STATES: [&str; 7] = [
    "starting",
    "running",
    "restarting",
    "paused",
    EXITED,
    FAILED,
    "unreadable",
];
const KEYS: [&str; 8] = [
    "id", "name", "label", "status", "exited", "ancestor", "publish", "health",
];

/// A condition on the sandboxes that are listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filter {
    /// The id begins so.
    Id(String),
    /// The name contains this.
    Name(String),
    /// There is this label, with this value if one is given.
    Label(String, Option<String>),
    Status(String),
    /// The exit status.
    Exited(i32),
    /// The image, as it was named, or its name without a tag.
    Ancestor(String),
    /// A port of the host or of the guest is published.
    Publish(u16),
    /// `None`: its health is not checked.
    Health(Option<HealthStatus>),
}

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Filter, String> {
        let keys = |key: &str| {
            let closest = closest(key, KEYS);
            format!("KEY=VALUE, where KEY is one of {}{closest}", KEYS.join(", "))
        };
        let (key, value) = text.split_once('=').ok_or_else(|| keys(text))?;
        let owned = value.to_owned();
        Ok(match key {
            "id" => Filter::Id(owned),
            "name" => Filter::Name(owned),
            "label" => match value.split_once('=') {
                Some((label, value)) => Filter::Label(label.into(), Some(value.into())),
                None => Filter::Label(owned, None),
            },
            "status" if STATES.contains(&value) => Filter::Status(owned),
            "status" => {
                let closest = closest(value, STATES);
                return Err(format!("status is one of {}{closest}", STATES.join(", ")));
            }
            "exited" => Filter::Exited(value.parse().map_err(|_| "exited is an exit status")?),
            "ancestor" => Filter::Ancestor(owned),
            "publish" => {
                let port = value.split_once('/').map_or(value, |(port, _)| port);
                Filter::Publish(port.parse().map_err(|_| "publish is a port")?)
            }
            "health" => Filter::Health(match value {
                "none" => None,
                "starting" => Some(HealthStatus::Starting),
                "healthy" => Some(HealthStatus::Healthy),
                "unhealthy" => Some(HealthStatus::Unhealthy),
                _ => return Err("health is one of starting, healthy, unhealthy, none".into()),
            }),
            _ => return Err(keys(key)),
        })
    }
}

impl Filter {
    fn admits(&self, row: &Row) -> bool {
        match self {
            Filter::Id(beginning) => row.id.starts_with(beginning.as_str()),
            Filter::Name(part) => row.name.as_ref().is_some_and(|name| name.contains(part.as_str())),
            Filter::Label(key, value) => {
                let label = row.labels.get(key);
                label.is_some_and(|has| value.as_ref().is_none_or(|value| value == has))
            }
            Filter::Status(state) => row.state == *state,
            Filter::Exited(status) => row.exit_code == Some(*status),
            Filter::Ancestor(image) => {
                let rest = row.image.strip_prefix(image.as_str());
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with([':', '@']))
            }
            Filter::Publish(port) => {
                let mut published = row.published.iter();
                published.any(|p| p.host == *port || p.guest == *port)
            }
            Filter::Health(status) => row.health == *status,
        }
    }

    /// Whether two filters are alternatives.
    fn is_alternative_of(&self, other: &Filter) -> bool {
        let is_label = matches!(self, Filter::Label(..));
        self == other || (!is_label && std::mem::discriminant(self) == std::mem::discriminant(other))
    }
}

/// Whether the filters admit a sandbox.
pub(super) fn admit(filters: &[Filter], row: &Row) -> bool {
    filters.iter().all(|filter| {
        let mut alternatives = filters.iter().filter(|other| filter.is_alternative_of(other));
        alternatives.any(|filter| filter.admits(row))
    })
}

/// Whether the filters name ended sandboxes, which are then listed without `--all`.
pub(super) fn names_ended(filters: &[Filter]) -> bool {
    filters.iter().any(|filter| match filter {
        Filter::Status(state) => [EXITED, FAILED].contains(&state.as_str()),
        Filter::Exited(_) => true,
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted(filters: &[&str]) -> bool {
        let row = Row {
            id: "abc".into(),
            name: Some("web-1".into()),
            state: EXITED.into(),
            exit_code: Some(3),
            image: "registry:5000/app:1".into(),
            labels: [("tier".into(), "front".into())].into(),
            ..Row::default()
        };
        let filters: Vec<Filter> = filters.iter().map(|text| text.parse().unwrap()).collect();
        admit(&filters, &row)
    }

    #[test]
    fn filters_of_a_key_are_alternatives_and_keys_conditions() {
        assert!(admitted(&[]));
        assert!(admitted(&["name=web", "id=ab", "exited=3", "status=exited"]));
        assert!(admitted(&["name=db", "name=web"]));
        assert!(!admitted(&["name=db", "id=ab"]));
        assert!(!admitted(&["id=bc"]));
        assert!(admitted(&["health=none"]) && !admitted(&["health=healthy"]));
    }

    #[test]
    fn labels_are_all_required() {
        assert!(admitted(&["label=tier", "label=tier=front"]));
        assert!(!admitted(&["label=tier", "label=other"]));
        assert!(!admitted(&["label=tier=back"]));
    }

    #[test]
    fn an_ancestor_is_an_image_with_or_without_its_tag() {
        assert!(admitted(&["ancestor=registry:5000/app:1"]));
        assert!(admitted(&["ancestor=registry:5000/app"]));
        assert!(!admitted(&["ancestor=registry:5000/ap"]));
    }

    #[test]
    fn wrong_filters_list_the_keys_or_states() {
        let error = |text: &str| text.parse::<Filter>().unwrap_err();
        assert!(error("volume=x").contains("ancestor"));
        assert!(error("name").contains("KEY=VALUE"));
        assert!(error("status=created").contains("exited"));
        assert!(error("health=good").contains("unhealthy"));
        assert!(!error("exited=x").is_empty() && !error("publish=http").is_empty());
        assert_eq!("publish=80/tcp".parse(), Ok(Filter::Publish(80)));
    }
}
