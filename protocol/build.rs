//! Generates the agent's ttrpc API and containerd's snapshots service from `proto/`, with parsers in Rust: no protoc on the
//! building machine.

fn main() -> std::io::Result<()> {
    println!("cargo::rerun-if-changed=proto");
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "agent")]
    generate()?;
    #[cfg(feature = "snapshots")]
    snapshots()?;
    Ok(())
}

#[cfg(feature = "agent")]
fn generate() -> std::io::Result<()> {
    use ttrpc_codegen::{Codegen, Customize, ProtobufCustomize};

    let out = std::path::PathBuf::from(std::env::var_os("OUT_DIR").ok_or(std::io::ErrorKind::NotFound)?)
        .join("agent");
    std::fs::create_dir_all(&out)?;
    Codegen::new()
        .out_dir(&out)
        .inputs(
            ["agent", "csi", "files", "health", "oci", "readiness", "types"]
                .map(|name| format!("proto/{name}.proto")),
        )
        .include("proto")
        .rust_protobuf()
        .rust_protobuf_customize(ProtobufCustomize::default().lite_runtime(true))
        .customize(Customize {
            async_all: true,
            ..Default::default()
        })
        .run()
        .map_err(std::io::Error::other)?;
    let modules = [
        "agent",
        "agent_ttrpc",
        "csi",
        "files",
        "files_ttrpc",
        "health",
        "health_ttrpc",
        "oci",
        "readiness",
        "readiness_ttrpc",
        "types",
    ];
    std::fs::write(
        out.join("mod.rs"),
        modules.map(|name| format!("pub mod {name};\n")).concat(),
    )
}

#[cfg(feature = "snapshots")]
fn snapshots() -> std::io::Result<()> {
    let parsed = protox::compile(["containerd/snapshots.proto"], ["proto"]).map_err(std::io::Error::other)?;
    tonic_prost_build::configure().compile_fds(parsed)
}
