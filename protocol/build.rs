//! Generates the agent's ttrpc API, what containerd's shim speaks, containerd's snapshots service and E2B's in-sandbox protocol from
//! `proto/`, with parsers in Rust: no protoc on the building machine.

fn main() -> std::io::Result<()> {
    println!("cargo::rerun-if-changed=proto");
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "agent")]
    generate(
        "agent",
        &[
            "agent",
            "csi",
            "files",
            "health",
            "hooks",
            "mounts",
            "oci",
            "processes",
            "readiness",
            "types",
        ],
        &[
            "agent",
            "files",
            "health",
            "hooks",
            "mounts",
            "processes",
            "readiness",
        ],
    )?;
    #[cfg(feature = "shim")]
    generate(
        "shim",
        &[
            "containerd/bootstrap",
            "containerd/cgroup2",
            "containerd/event",
            "containerd/events",
            "containerd/introspection",
            "containerd/metrics",
            "containerd/mount",
            "containerd/platform",
            "containerd/pod_sandbox",
            "containerd/runc_options",
            "containerd/runtimeoptions",
            "containerd/sandbox",
            "containerd/task",
            "containerd/task_events",
            "containerd/task_types",
            "pods",
        ],
        &["events", "pods", "sandbox", "task"],
    )?;
    #[cfg(feature = "snapshots")]
    snapshots()?;
    #[cfg(feature = "e2b")]
    e2b()?;
    Ok(())
}

/// Messages, clients and server traits of these files, as modules of `OUT_DIR/PLACE`.
#[cfg(any(feature = "agent", feature = "shim"))]
fn generate(place: &str, protos: &[&str], services: &[&str]) -> std::io::Result<()> {
    use ttrpc_codegen::{Codegen, Customize, ProtobufCustomize};

    let out = std::path::PathBuf::from(std::env::var_os("OUT_DIR").ok_or(std::io::ErrorKind::NotFound)?)
        .join(place);
    std::fs::create_dir_all(&out)?;
    Codegen::new()
        .out_dir(&out)
        .inputs(protos.iter().map(|name| format!("proto/{name}.proto")))
        .include("proto")
        .rust_protobuf()
        .rust_protobuf_customize(ProtobufCustomize::default().lite_runtime(true))
        .customize(Customize {
            async_all: true,
            ..Default::default()
        })
        .run()
        .map_err(std::io::Error::other)?;
    let messages = protos
        .iter()
        .map(|path| path.rsplit('/').next().unwrap_or(path).to_string());
    let services = services.iter().map(|name| format!("{name}_ttrpc"));
    let modules: String = messages
        .chain(services)
        .map(|name| format!("pub mod {name};\n"))
        .collect();
    std::fs::write(out.join("mod.rs"), modules)
}

#[cfg(feature = "snapshots")]
fn snapshots() -> std::io::Result<()> {
    let parsed = protox::compile(["containerd/snapshots.proto"], ["proto"]).map_err(std::io::Error::other)?;
    tonic_prost_build::configure().compile_fds(parsed)
}

/// Messages, and their descriptors for the JSON mapping.
#[cfg(feature = "e2b")]
fn e2b() -> std::io::Result<()> {
    use prost::Message;

    let parsed = protox::compile(["e2b/process.proto", "e2b/filesystem.proto"], ["proto"])
        .map_err(std::io::Error::other)?;
    let out = std::path::PathBuf::from(std::env::var_os("OUT_DIR").ok_or(std::io::ErrorKind::NotFound)?);
    std::fs::write(out.join("e2b.descriptors"), parsed.encode_to_vec())?;
    prost_build::Config::new().enable_type_names().compile_fds(parsed)
}
