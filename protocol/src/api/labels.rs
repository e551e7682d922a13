//! The OpenAPI schema of labels.

/// The schema of labels.
pub(super) fn labels() -> utoipa::openapi::schema::Object {
    use utoipa::openapi::schema::{ObjectBuilder, Type};
    let text = |pattern: &str| {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .pattern(Some(pattern))
    };
    ObjectBuilder::new()
        .schema_type(Type::Object)
        .description(Some("Labels by which callers select it; docs/api.md describes the syntax."))
        .max_properties(Some(64))
        .property_names(Some(text(
            r"^([A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$",
        )))
        .additional_properties(Some(text(r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")))
        .build()
}
