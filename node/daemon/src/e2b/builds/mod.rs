//! Builds of templates, as E2B's SDKs ask for them (docs/e2b.md).
//!
//! A build makes a sandbox of its base, executes steps in it, runs the template's commands and freezes it into a stored snapshot of the
//! tenant. Sandboxes of the template are thawed from that.
//!
//! | module | noun |
//! |---|---|
//! | [`record`], [`names`], [`store`] | what is kept of a template, its name and tags, and all templates |
//! | [`uploads`] | the archives for COPY |
//! | [`step`] | the steps as they were sent |
//! | [`log`] | the log of a build |
//! | [`guest`], [`execute`], [`ready`] | commands in the sandbox of a build, its steps, its start and ready commands |
//! | [`base`], [`make`] | what a build begins with, and one build |
//! | [`engine`] | all builds in progress |
//!
//! Nothing here knows requests: the handlers are in [`super::build_calls`], [`super::templates`] and [`super::tags`].

pub mod base;
pub mod engine;
pub mod execute;
pub mod guest;
pub mod log;
pub mod make;
pub mod names;
pub mod ready;
pub mod record;
pub mod step;
pub mod store;
pub mod uploads;
