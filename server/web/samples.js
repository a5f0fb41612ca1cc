// Three pictures for a first try, drawn here so that nothing is fetched.

const SIDE = 224;

function draw(background, colour, shape) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = SIDE;
  const pen = canvas.getContext("2d");
  pen.fillStyle = background;
  pen.fillRect(0, 0, SIDE, SIDE);
  pen.fillStyle = colour;
  pen.beginPath();
  if (shape === "circle") pen.arc(SIDE / 2, SIDE / 2, SIDE * 0.32, 0, Math.PI * 2);
  else if (shape === "square") pen.rect(SIDE * 0.2, SIDE * 0.2, SIDE * 0.6, SIDE * 0.6);
  else {
    pen.moveTo(SIDE / 2, SIDE * 0.16);
    pen.lineTo(SIDE * 0.84, SIDE * 0.8);
    pen.lineTo(SIDE * 0.16, SIDE * 0.8);
    pen.closePath();
  }
  pen.fill();
  return canvas;
}

export const SAMPLES = [
  { name: "Red circle on white", background: "#ffffff", colour: "#ff0000", shape: "circle" },
  { name: "Blue square on yellow", background: "#ffff00", colour: "#0000ff", shape: "square" },
  { name: "Green triangle on black", background: "#000000", colour: "#00ff00", shape: "triangle" },
];

/** The sample as a PNG file, as if the person had picked it. */
export function sampleFile({ name, background, colour, shape }) {
  return new Promise((resolve) => draw(background, colour, shape).toBlob(
    (blob) => resolve(new File([blob], `${name.toLowerCase().replaceAll(" ", "-")}.png`, { type: "image/png" })), "image/png",
  ));
}

/** The drawn canvas, to show on a button. */
export const sampleCanvas = ({ background, colour, shape }) => draw(background, colour, shape);
