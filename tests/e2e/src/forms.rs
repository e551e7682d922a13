//! One image in every form Thaw reads, in a registry behind a proxy.
//!
//! The image has every kind of file and attribute, whiteouts over several layers, the probe, and files large enough that
//! reading a part of them is not reading all.

use std::path::Path;

use serde_json::Value;
use thaw_test_registry::image::{LAYER, Layer, Layout};
use thaw_test_registry::proxy::{Link, Proxy};
use thaw_test_registry::{estargz, frames};

use crate::home::Home;
use crate::layout::tar_of;
use crate::probe::pattern;
use crate::run;
use crate::upstream::Upstream;

/// Bytes of the file whose bytes are known, [`crate::probe::FILE`].
pub const KNOWN: usize = 4 << 20;
/// Bytes of a file nobody reads, which do not compress.
const UNREAD: usize = 6 << 20;

/// A node, a registry, and what is between them.
pub struct Forms {
    pub home: Home,
    pub proxy: Proxy,
    pub upstream: Upstream,
    layout: Layout,
}

/// A form's name, and whether reads of it come in pieces.
pub const FORMS: [(&str, bool); 8] = [
    ("gzip", false),
    ("tar", false),
    ("zstd", false),
    ("estargz", true),
    ("soci", true),
    ("fixed", true),
    ("content-defined", true),
    ("dictionary", true),
];

impl Forms {
    /// A registry that has the image in these forms.
    pub fn new(probe: &str, forms: &[&str]) -> Forms {
        let home = Home::new();
        let folder = home.scratch("layout");
        let layout = Layout::at(&folder);
        let upstream = Upstream::empty(&home.scratch("upstream").join("registry"));
        let proxy = Proxy::start(&upstream.host, Link::default()).unwrap();
        let made = Forms {
            home,
            proxy,
            upstream,
            layout,
        };
        made.write_gzip(probe);
        made.push("gzip");
        for form in forms.iter().filter(|form| **form != "gzip") {
            made.add(form);
        }
        made.home.forget_images();
        made.proxy.reset();
        made
    }

    /// The reference of a form, through the proxy.
    pub fn reference(&self, form: &str) -> String {
        format!("{}/forms:{form}", self.proxy.host())
    }

    /// Bytes of the image's layers as a registry stores them.
    pub fn stored(&self) -> u64 {
        let layers = self.layout.image("gzip").layers;
        layers
            .iter()
            .map(|l| l.descriptor["size"].as_u64().unwrap())
            .sum()
    }

    /// What `thaw run IMAGE /probe …` prints.
    pub fn probe(&self, options: &[&str], form: &str, words: &[&str]) -> String {
        let reference = self.reference(form);
        let mut arguments = vec!["run", "--rm", "--network", "none"];
        arguments.extend(options);
        arguments.extend([reference.as_str(), "/probe"]);
        arguments.extend(words);
        run(&mut self.home.thaw(&arguments)).ok()
    }

    fn write_gzip(&self, probe: &str) {
        let images =
            std::env::var("THAW_TEST_IMAGES").expect("THAW_TEST_IMAGES names the test images' layout");
        let images = Layout::at(Path::new(&images));
        let (types, whiteouts) = (images.image("filetypes"), images.image("whiteouts"));
        // Busybox and every kind of file; what only GNU's sparse format can say is not for eStargz.
        let mut layers = types.layers[..2].to_vec();
        layers.extend_from_slice(&whiteouts.layers[1..]);
        let mut layers: Vec<Layer> = layers
            .iter()
            .map(|layer| self.layout.take(&images, layer))
            .collect();
        let program = std::fs::read(probe).unwrap();
        let known: Vec<u8> = (0..KNOWN).map(pattern).collect();
        let tar = tar_of(&[("probe", &program), ("unread", &noise(UNREAD)), ("known", &known)]);
        layers.push(self.layout.gzip_layer(&tar));
        self.layout.write("gzip", &types, &layers);
    }

    fn push(&self, form: &str) {
        self.upstream
            .push(&self.layout.reference(form), &format!("forms:{form}"));
    }

    fn add(&self, form: &str) {
        let image = self.layout.image("gzip");
        let layer = |tar: Vec<u8>| match form {
            "tar" => self.layout.layer(&tar, &tar, LAYER, Value::Null),
            "zstd" => {
                let stored = frames::zstd(&tar, 1 << 20);
                self.layout
                    .layer(&tar, &stored, &format!("{LAYER}+zstd"), Value::Null)
            }
            _ => {
                let made = estargz::write(&tar);
                self.layout.layer(
                    &made.tar,
                    &made.stored,
                    &format!("{LAYER}+gzip"),
                    made.annotations,
                )
            }
        };
        let (from, to) = (self.reference("gzip"), self.reference(form));
        let thaw = |words: &[&str]| run(&mut self.home.thaw(words)).ok();
        match form {
            "tar" | "zstd" | "estargz" => {
                let layers: Vec<_> = image.layers.iter().map(|l| layer(self.layout.tar(l))).collect();
                self.layout.write(form, &image, &layers);
                self.push(form);
            }
            "soci" => {
                // The usual 4 MiB would be half of this image.
                thaw(&["image", "index", "--span-size", "1m", &from, &to]);
            }
            "fixed" | "content-defined" => {
                thaw(&["image", "convert", "--chunking", form, &from, &to]);
            }
            "dictionary" => {
                let base = self.reference("fixed");
                thaw(&["image", "convert", "--dictionary", &base, &from, &to]);
            }
            _ => panic!("no form {form}"),
        }
    }
}

/// xorshift64.
fn noise(size: usize) -> Vec<u8> {
    let mut state = 88_172_645_463_325_252u64;
    let mut out = Vec::with_capacity(size + 8);
    while out.len() < size {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend(state.to_le_bytes());
    }
    out.truncate(size);
    out
}
