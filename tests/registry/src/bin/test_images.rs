//! `test-images FORM LAYOUT TAG TO-LAYOUT NAME`: writes an image in another form into an OCI layout.
//!
//! `padded`: with layers on top that make its tars 1 GiB in all. `estargz`: its layers as eStargz. `zstd`: its layers as
//! zstd, in frames of 1 MiB. `large-file`: with a file of 64 MiB on top, `/large`. `changed`: with one byte of one file changed.

use std::path::Path;
use std::process::ExitCode;

use serde_json::Value;
use thaw_test_registry::image::{LAYER, Layout};
use thaw_test_registry::{estargz, frames, padded};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [form, from, tag, to, name] = &words[..] else {
        return usage();
    };
    let (from, to) = (Layout::at(Path::new(from)), Layout::at(Path::new(to)));
    match form.as_str() {
        "padded" => padded::write(&from, tag, &to, name, 1 << 30),
        "large-file" => padded::with_large_file(&from, tag, &to, name, 64 << 20),
        "changed" => padded::with_one_change(&from, tag, &to, name),
        "estargz" | "zstd" => {
            let image = from.image(tag);
            let layer = |tar: Vec<u8>| match form.as_str() {
                "estargz" => {
                    let made = estargz::write(&tar);
                    to.layer(
                        &made.tar,
                        &made.stored,
                        &format!("{LAYER}+gzip"),
                        made.annotations,
                    )
                }
                _ => to.layer(
                    &tar,
                    &frames::zstd(&tar, 1 << 20),
                    &format!("{LAYER}+zstd"),
                    Value::Null,
                ),
            };
            let layers: Vec<_> = image.layers.iter().map(|l| layer(from.tar(l))).collect();
            to.write(name, &image, &layers);
        }
        _ => return usage(),
    }
    ExitCode::SUCCESS
}

fn usage() -> ExitCode {
    eprintln!("usage: test-images padded|large-file|changed|estargz|zstd LAYOUT TAG TO-LAYOUT NAME");
    ExitCode::from(2)
}
