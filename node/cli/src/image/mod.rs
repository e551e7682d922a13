//! `thaw image`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand, ValueEnum};
use serde_json::json;
use thaw_images::convert::Chunking;
use thaw_images::pull::PullOptions;
use thaw_sandbox::config::{Config, Size};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::images::{Images, Pull, size};
use thaw_sandbox::paths::Paths;

use crate::format::Format;
use crate::ui::Ui;

mod keep;
mod make;
mod show;

pub(super) use show::described;

const FORMS: &str = "\
An image is in the store whole, or as an index with as much of its file data as was read so far; the rest is fetched as
it is read. docs/images.md says which forms of images start so, and how to make them.";

#[derive(Debug, Subcommand)]
#[command(after_help = FORMS)]
pub enum ImageCommand {
    /// Pull an image into the store, or as much of it as a start needs
    #[command(
        after_help = "Prints the digest of the image's manifest.\n\nExamples:\n  thaw image pull registry.example/python:3\n  thaw image pull --full oci:./app"
    )]
    Pull(PullArguments),
    /// List the images in the store: their form, and how much of each is present
    #[command(after_help = "Example:\n  thaw --json image ls | jq -r '.[].reference'")]
    Ls(ImagesArguments),
    /// Show the state of an image, layer by layer
    #[command(after_help = "Example:\n  thaw image inspect registry.example/python:3")]
    Inspect {
        /// The image: reference, digest, or the beginning of a digest
        image: String,
    },
    /// Show the disk usage of the store, by image
    #[command(after_help = "Example:\n  thaw image du")]
    Du,
    /// Free disk space: remove file data that no sandbox uses. Trees and indexes stay, and later starts read on demand
    #[command(
        after_help = "Example:\n  thaw image prune --until 20g   # what was not used for longest goes first"
    )]
    Prune {
        /// Only from these images
        #[arg(value_name = "IMAGE", conflicts_with_all = ["all", "until"])]
        images: Vec<String>,
        /// Remove the images completely, with their indexes
        #[arg(long, conflicts_with = "until")]
        all: bool,
        /// Only until the store has at most this size: bytes, or with k, m, g, t. First data is removed, then images
        #[arg(long, value_name = "SIZE", value_parser = Size::from_str)]
        until: Option<Size>,
    },
    /// Compare the file data in the store with its digests
    #[command(
        after_help = "Exits with 101 when something is damaged and was not repaired. Damaged data no sandbox uses is fetched again when it is read.\n\nExample:\n  thaw image verify --repair"
    )]
    Verify {
        /// The images [default: all]
        #[arg(value_name = "IMAGE")]
        images: Vec<String>,
        /// Fetch damaged data again, at once
        #[arg(long)]
        repair: bool,
    },
    /// Remove images that no sandbox uses
    #[command(after_help = "Example:\n  thaw image rm registry.example/python:3")]
    Rm(RemoveArguments),
    /// Make a SOCI v2 index of an image, and push the image with it
    #[command(
        after_help = "The layers stay as they are: clients that know nothing of SOCI pull the image as before.\n\nAWS's soci-snapshotter 0.4.1 mounts layers by these ztocs; it knows SOCI v1 alone, and no tool of AWS's that knows v2 has been run on the index itself.\n\nPrints the digest of what was pushed.\n\nExample:\n  thaw image index registry.example/python:3 registry.example/python:3-soci"
    )]
    Index(IndexArguments),
    /// Convert an image to deduplicated chunks that are read on demand, and push it as an OCI artifact
    #[command(
        after_help = "The result refers to the original, and is the same bytes for the same input and flags. Prints its digest.\n\nExamples:\n  thaw image convert registry.example/app:1 registry.example/app:1-thaw\n  thaw image convert --dictionary registry.example/base:1-thaw registry.example/app:2 registry.example/app:2-thaw"
    )]
    Convert(ConvertArguments),
}

#[derive(Debug, Args)]
pub struct PullArguments {
    /// The image, as for `thaw run`
    pub image: String,
    /// Pull everything now, even if the image can be read on demand
    #[arg(long)]
    pub full: bool,
    /// Use HTTP without TLS for the registry
    #[arg(long)]
    pub plain_http: bool,
}

#[derive(Debug, Args)]
pub struct ImagesArguments {
    /// Also those for containerd's snapshots: they consist of the lowest layers of an image, and are removed with the snapshot
    #[arg(short, long)]
    pub all: bool,
    /// `json`: an object per line; or a Go template: fields are .Repository .Tag .ID .Digest .Size .Present .Form .Image
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<Format>,
}

#[derive(Debug, Args)]
pub struct RemoveArguments {
    /// References or digests
    #[arg(required = true, value_name = "IMAGE")]
    pub images: Vec<String>,
}

#[derive(Debug, Args)]
pub struct IndexArguments {
    /// The image: in a registry or a layout directory
    pub image: String,
    /// Where to push it [default: the image's name with -soci after its tag]
    pub destination: Option<String>,
    /// Layers with fewer stored bytes get no index and are fetched whole
    #[arg(long, value_name = "SIZE", default_value = "1m", value_parser = Size::from_str)]
    pub min_layer_size: Size,
    /// Distance between the points at which a layer can be read, from 256k to 8m: a smaller one fetches less for a read
    /// and makes the index larger, by 32 KiB for each point
    #[arg(long, value_name = "SIZE", default_value = "4m", value_parser = span_size)]
    pub span_size: Size,
    /// Use HTTP without TLS for the registry
    #[arg(long)]
    pub plain_http: bool,
}

fn span_size(text: &str) -> Result<Size, String> {
    let size: Size = text.parse()?;
    match thaw_sandbox::image::index::SPANS.contains(&size.0) {
        true => Ok(size),
        false => Err("use a size from 256k to 8m".into()),
    }
}

#[derive(Debug, Args)]
pub struct ConvertArguments {
    /// The image, as for `thaw run`
    pub source: String,
    /// Where to push it: a registry's repository with a tag, or oci:DIR[:TAG]
    pub destination: String,
    /// How files are cut into chunks: `fixed`: at multiples of a size; `content`: by their content, so that an insertion
    /// does not move later cuts [default: as in the first dictionary, else fixed]
    #[arg(long, value_name = "HOW", value_enum)]
    pub chunking: Option<Cut>,
    /// Size of a chunk (for `content`, the average), a power of two: with k or m, from 4k to 4m [default: 256k]
    #[arg(long, value_name = "SIZE", value_parser = Size::from_str, requires = "chunking")]
    pub chunk_size: Option<Size>,
    /// A converted image whose chunks are referenced instead of stored again. May be repeated
    #[arg(long, value_name = "IMAGE")]
    pub dictionary: Vec<String>,
    /// Order the data as this recording (`thaw run --record=FILE`) read it [default: the recording of the image in the
    /// store, if there is one]
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// The compression level of zstd
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(i32).range(1..=22))]
    pub level: i32,
    /// Use HTTP without TLS for the registry
    #[arg(long)]
    pub plain_http: bool,
}

/// How files are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Cut {
    Fixed,
    #[value(alias = "content-defined", alias = "cdc")]
    Content,
}

impl ConvertArguments {
    /// How files are cut, by the flags.
    fn chunking(&self) -> Result<Option<Chunking>, Error> {
        let text = match (self.chunking, self.chunk_size) {
            (None, _) => return Ok(None),
            (Some(Cut::Fixed), None) => "fixed".to_owned(),
            (Some(Cut::Fixed), Some(size)) => format!("fixed:{}", size.0),
            (Some(Cut::Content), None) => "cdc".to_owned(),
            (Some(Cut::Content), Some(size)) => format!("cdc:{}:{}:{}", size.0 / 4, size.0, size.0 * 4),
        };
        text.parse()
            .map(Some)
            .map_err(|e| Error::new(ErrorKind::Runtime, format!("--chunk-size: {e}")))
    }
}

/// `thaw images`.
pub(super) fn list(arguments: &ImagesArguments, ui: &Ui) -> Result<u8, Error> {
    show::list(&open()?, arguments, ui).map(|()| 0)
}

/// `thaw pull`.
pub(super) async fn pull(arguments: &PullArguments, ui: &Ui, json: bool) -> Result<u8, Error> {
    let images = open()?;
    tokio::select! {
        done = pull_into(&images, arguments, ui, json) => done.map(|()| 0),
        status = super::interrupt::interrupted() => Ok(status),
    }
}

/// `thaw rmi`.
pub(super) fn remove(arguments: &RemoveArguments, json: bool) -> Result<u8, Error> {
    keep::remove(&open()?, &arguments.images, json).map(|()| 0)
}

/// The images of this node.
pub(super) fn open() -> Result<Images, Error> {
    Images::open_with(&Paths::from_env().images(), Config::from_env()?)
}

pub(super) async fn image(command: &ImageCommand, ui: &Ui, json: bool) -> Result<u8, Error> {
    let images = open()?;
    let work = async {
        match command {
            ImageCommand::Pull(arguments) => pull_into(&images, arguments, ui, json).await,
            ImageCommand::Ls(arguments) => show::list(&images, arguments, ui),
            ImageCommand::Inspect { image } => show::inspect(&images, image, json),
            ImageCommand::Du => show::du(&images, json),
            ImageCommand::Prune {
                images: wanted,
                all,
                until,
            } => keep::prune(&images, wanted, *all, *until, json),
            ImageCommand::Verify {
                images: wanted,
                repair,
            } => keep::verify(&images, wanted, *repair, ui, json).await,
            ImageCommand::Rm(arguments) => keep::remove(&images, &arguments.images, json),
            ImageCommand::Index(arguments) => make::index(&images, arguments, ui, json).await,
            ImageCommand::Convert(arguments) => make::convert(&images, arguments, ui, json).await,
        }
    };
    tokio::select! {
        done = work => done.map(|()| 0),
        status = super::interrupt::interrupted() => Ok(status),
    }
}

async fn pull_into(images: &Images, arguments: &PullArguments, ui: &Ui, json: bool) -> Result<(), Error> {
    let options = PullOptions {
        lazy: !arguments.full,
        ..images.pull_options(Pull::Always, arguments.plain_http)
    };
    let image = &arguments.image;
    let reference = image.parse().map_err(thaw_sandbox::images::failure)?;
    let pulled = images.pull_with(&reference, &options, ui.pull()).await?;
    super::print(&match json {
        true => {
            json!({"image": image, "digest": pulled.digest.to_string(), "bytes": size(&pulled)}).to_string()
        }
        false => pulled.digest.to_string(),
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{Cli, Command};
    use super::*;
    use clap::Parser;

    fn parse(line: &[&str]) -> Result<ImageCommand, clap::Error> {
        let cli = Cli::try_parse_from(["thaw", "image"].iter().chain(line))?;
        match cli.command {
            Command::Image(command) => Ok(command),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn chunkings_are_what_a_conversion_takes() {
        let chunking = |line: &[&str]| match parse(&[&["convert", "a", "b"], line].concat()) {
            Ok(ImageCommand::Convert(arguments)) => arguments.chunking(),
            other => panic!("{other:?}"),
        };
        assert_eq!(chunking(&[]).unwrap(), None);
        assert_eq!(
            chunking(&["--chunking", "fixed", "--chunk-size", "64k"]).unwrap(),
            Some(Chunking::Fixed { size: 64 << 10 })
        );
        assert_eq!(
            chunking(&["--chunking", "content", "--chunk-size", "256k"]).unwrap(),
            Some(Chunking::ContentDefined {
                min: 64 << 10,
                average: 256 << 10,
                max: 1 << 20
            })
        );
        assert!(chunking(&["--chunking", "content-defined"]).unwrap().is_some());
        for size in ["3k", "8m", "1"] {
            chunking(&["--chunking", "fixed", "--chunk-size", size]).unwrap_err();
        }
    }

    #[test]
    fn what_excludes_each_other_is_wrong_usage() {
        for line in [
            &["prune", "--all", "--until", "1g"][..],
            &["prune", "--all", "x"],
            &["prune", "--until", "much"],
            &["convert", "a"],
            &["convert", "a", "b", "--chunk-size", "4k"],
            &["convert", "a", "b", "--level", "0"],
            &["inspect"],
        ] {
            assert!(parse(line).is_err(), "{line:?}");
        }
        assert!(parse(&["prune"]).is_ok());
        assert!(parse(&["verify"]).is_ok());
    }
}
