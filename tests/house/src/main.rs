//! `make house`: measures how the source tree is built. `--check` fails where a measure is above its limit in `tests/house/limits`,
//! `--keep` lowers the limits to what is measured, and names of measures list the places that make them.

mod citations;
mod cycles;
mod duplicates;
mod house;
mod limits;
mod measures;
mod scan;
mod tree;

use std::process::ExitCode;

use house::House;
use limits::Limits;
use measures::Measure;

const LIMITS: &str = "tests/house/limits";
/// The commit that lines are compared with.
const BEFORE: &str = "4ceeabf";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("house: {why}");
            ExitCode::from(2)
        }
    }
}

/// False if a measure is above its limit and `--check` was asked for.
fn run(arguments: &[String]) -> Result<bool, String> {
    let tree = tree::working()?;
    let house = House::build(&tree)?;
    let measures = measures::all(&tree, &house)?;
    let limits = read_limits()?;
    match arguments {
        [] => print_all(&measures, &limits, &house),
        [option] if option == "--check" => return Ok(check(&measures, &limits)),
        [option] if option == "--keep" => {
            let measured = measures
                .iter()
                .map(|measure| (measure.name, measure.places.len()));
            let text = limits::render(&limits::lowered(&limits, measured));
            std::fs::write(LIMITS, text).map_err(|e| format!("{LIMITS}: {e}"))?;
        }
        names => {
            for name in names {
                let measure = measures.iter().find(|measure| measure.name == name);
                print_places(measure.ok_or_else(|| format!("there is no measure {name}"))?);
            }
        }
    }
    Ok(true)
}

fn read_limits() -> Result<Limits, String> {
    match std::fs::read_to_string(LIMITS) {
        Ok(text) => limits::parse(&text).map_err(|why| format!("{LIMITS}: {why}")),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Limits::new()),
        Err(e) => Err(format!("{LIMITS}: {e}")),
    }
}

fn print_all(measures: &[Measure], limits: &Limits, house: &House) {
    println!("{:>7} {:>7}  measure", "now", "limit");
    for measure in measures {
        let limit = limits
            .get(measure.name)
            .map_or("none".to_owned(), ToString::to_string);
        println!(
            "{:>7} {limit:>7}  {}: {}",
            measure.places.len(),
            measure.name,
            measure.what
        );
    }
    let (lines, code) = measures::release_lines(house);
    println!("{lines:>7} {:>7}  lines of Rust outside tests", "");
    println!("{code:>7} {:>7}  of them neither empty nor comments", "");
    match tree::at_commit(BEFORE).and_then(|tree| House::build(&tree)) {
        Ok(before) => {
            let (lines_before, code_before) = measures::release_lines(&before);
            let change = |now: usize, before: usize| 100.0 * (now as f64 / before as f64 - 1.0);
            println!(
                "At {BEFORE}: {lines_before} and {code_before} of them: {:+.1} % and {:+.1} % since.",
                change(lines, lines_before),
                change(code, code_before)
            );
        }
        Err(why) => println!("At {BEFORE}: unknown: {why}"),
    }
    println!("`make house LIST=\"NAME ...\"` lists the places of measures.");
}

fn check(measures: &[Measure], limits: &Limits) -> bool {
    let is_above = |measure: &&Measure| {
        limits
            .get(measure.name)
            .is_some_and(|limit| measure.places.len() > *limit)
    };
    let above: Vec<&Measure> = measures.iter().filter(is_above).collect();
    for measure in &above {
        eprintln!(
            "house: {}: {}, and {} at most:",
            measure.name,
            measure.places.len(),
            limits[measure.name]
        );
        print_places(measure);
    }
    if above.is_empty() {
        println!("house: {} measures within their limits", measures.len());
    } else {
        eprintln!(
            "house: bring these down, or raise the limits in {LIMITS} and say why in the commit's message"
        );
    }
    above.is_empty()
}

fn print_places(measure: &Measure) {
    for place in &measure.places {
        println!("{}: {place}", measure.name);
    }
}
