//! Programs that use E2B's own SDKs, unchanged, for tests. `tests/e2b/run` installs the SDKs and runs these tests.

use std::path::Path;

/// An SDK, by the language of its programs.
#[derive(Clone, Copy, Debug)]
pub enum Sdk {
    Python,
    JavaScript,
}

impl Sdk {
    /// Runs a program against this address of the API and of all sandboxes, and panics if it fails. `program` is its path below this
    /// package, without the extension: each SDK has its own.
    pub async fn run(self, program: &str, url: &str, variables: &[(&str, &str)]) {
        let (variable, extension) = match self {
            Sdk::Python => ("THAW_E2B_PYTHON", "py"),
            Sdk::JavaScript => ("THAW_E2B_NODE", "mjs"),
        };
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("{program}.{extension}"));
        let interpreter = std::env::var_os(variable);
        let interpreter = interpreter.unwrap_or_else(|| {
            panic!("{variable} names what runs programs with the SDK: tests/e2b/run sets it")
        });
        let mut run = tokio::process::Command::new(interpreter);
        run.arg(&program)
            .env("E2B_API_URL", url)
            .env("E2B_SANDBOX_URL", url)
            .envs(variables.iter().copied());
        let status = run.status().await.unwrap();
        assert!(status.success(), "{}: {status}", program.display());
    }
}
