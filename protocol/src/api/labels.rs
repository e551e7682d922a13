//! The OpenAPI schema of labels.

use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};

/// The schema of labels.
pub(super) fn labels() -> utoipa::openapi::schema::Object {
    of_type(Type::String.into())
}

/// The schema of changes of labels, in which `null` removes a label.
pub(super) fn changed_labels() -> utoipa::openapi::schema::Object {
    let mut changed = of_type(SchemaType::from_iter([Type::String, Type::Null]));
    changed.schema_type = SchemaType::from_iter([Type::Object, Type::Null]);
    changed.description =
        Some("Labels to set; a label that is `null` is removed. `null` removes all.".into());
    changed
}

fn of_type(value: SchemaType) -> utoipa::openapi::schema::Object {
    let text =
        |kind: SchemaType, pattern: &str| ObjectBuilder::new().schema_type(kind).pattern(Some(pattern));
    ObjectBuilder::new()
        .schema_type(Type::Object)
        .description(Some("Labels by which callers select it; docs/api.md describes the syntax."))
        .max_properties(Some(64))
        .property_names(Some(text(
            Type::String.into(),
            r"^([A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$",
        )))
        .additional_properties(Some(text(value, r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")))
        .build()
}
